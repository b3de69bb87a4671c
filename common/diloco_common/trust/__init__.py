"""Who calls, and how callers prove it."""
