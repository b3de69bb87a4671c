"""Who calls, and how that is proven."""
