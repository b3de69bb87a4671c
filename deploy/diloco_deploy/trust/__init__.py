"""Who belongs to a run: its CA, certificates, and the list of those that hold no longer."""
