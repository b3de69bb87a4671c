"""The `diloco` command: brings up a cluster on this machine, supervises it, and shows its state."""

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)
