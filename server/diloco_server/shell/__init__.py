"""What carries out the decisions of the core: an event loop, threads, a disk, gRPC and HTTP. Start at `host.py`."""
