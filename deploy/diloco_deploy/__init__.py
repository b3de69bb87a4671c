"""The `diloco` command: brings up a cluster on this machine, supervises it, and shows its state.

    cluster/     one pure model of a cluster, and how processes are asked
    show/        the model on a terminal: status, tables, the report of a run
    web/         the model as a live page
    run/         `diloco up`, on this machine or on Ray: children, folder, members, other numbers of them
    trust/       certificates and tokens
    checkpoint/  checkpoints, exports, `diloco pull`
    doctor/, explain/, plan/   what is wrong, what it means, and what will be needed
    chaos/       a run with faults, and what became of its work

`cli.py` is the table of commands. A command lies where its work is.
"""

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)
