"""The operator's tools: bring up a cluster on this machine, supervise it, and show the state of any.

    cluster/     one pure model of a cluster, and how processes are asked
    status.py, record.py, terminal.py, report.py    the model on a terminal, and what a run came to
    web/         the model as a live page
    run/         `diloco up`, on this machine or on Ray: children, folder, members, resizing
    trust/       certificates and tokens
    checkpoint/  checkpoints, exports, `diloco pull`
    doctor/      find problems; catalogue.py and codes.py explain their codes

`cli.py` lists the commands; `diloco_common/program.py` runs them. Each command is beside its work.
"""

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)
