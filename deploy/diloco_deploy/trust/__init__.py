"""Who belongs to a run: its CA, certificates, signed tokens, and the list of those that hold no longer."""
