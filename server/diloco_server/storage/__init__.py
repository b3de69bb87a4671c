"""Keeps versions on disk: the format of a file, the order of writes, and the lock on the folder."""
