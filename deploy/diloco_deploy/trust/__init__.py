"""The identities of a run: its certificate authority, certificates and deny-list."""
