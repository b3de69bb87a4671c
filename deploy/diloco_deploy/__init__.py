"""The operator's tools: bring up a cluster on this machine, supervise it, and show the state of any.

    cluster/     one pure model of a cluster, and how processes are asked
    status.py, terminal.py, report.py    the model on a terminal, and a run's report
    web/         the model as a live page
    run/         `diloco up`, on this machine or on Ray: folder, members, resizing
    trust/       certificates and tokens
    checkpoint/  checkpoints, exports, `diloco pull`
    doctor/      find problems; codes.py explains their codes

`cli.py` lists the commands; `diloco_common/command.py` runs them. Each command is in the package that does its work.
"""

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)

LOOK_S = 0.1
"""How often code here checks again for something that it waits for."""
EVERY_S = 1.0
"""How often displayed members are asked, and the view is redrawn."""
ASK_S = 3.0
"""Longest wait for one answer from a process; a process that is silent for longer is reported."""
START_S = 10.0
"""Longest wait until a process that we started serves."""
THREADS_MAX = 16
"""Maximum number of threads, or calls, that ask at once."""
