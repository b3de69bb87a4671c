"""A shard: one parameter-server process. `core/` decides; the files beside it act (gRPC, threads, disk)."""

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)
