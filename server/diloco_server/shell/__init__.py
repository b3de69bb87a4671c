"""Carries out the decisions of the core, with an event loop, threads, a disk, gRPC and HTTP. Start at `host.py`."""
