"""The operator's tools: bring up a cluster on this machine, supervise it, and show the state of any.

    cluster/     one pure model of a cluster, and how processes are asked
    show/        the model on a terminal: status, tables, the report of a run
    web/         the model as a live page
    run/         `diloco up`, on this machine or on Ray: children, folder, members, resizing
    trust/       certificates and tokens
    checkpoint/  checkpoints, exports, `diloco pull`
    doctor/, explain/   find problems, and explain their codes

`cli.py` lists the commands; `diloco_common/program.py` runs them. Each command is in the folder of its work.
"""

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)
