"""A shard: one parameter-server process. `core/` decides, `shell/` acts (gRPC, threads), `storage/` keeps versions."""

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)
