"""`python -m diloco_chaos`: run a local cluster, inject faults by a seeded plan, and judge what every process recorded.

__main__.py  the command, from the fault-free run to the exit code
faults.py    the faults: their plan, a pure function of the seed, and the cluster that they are injected into
result.py    how much work got through, and the longest pause of a living worker, as numbers and in words

diloco_simulator/verify/judge.py judges whether the promises were kept.
"""

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)
