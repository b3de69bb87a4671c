"""A shard: one parameter-server process. `core/` decides; the files beside it act (gRPC, threads, disk)."""
