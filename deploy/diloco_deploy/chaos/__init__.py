"""`diloco chaos`: run a local cluster, inject faults by a seeded plan, and judge what every process recorded.

plan.py      which fault hits whom, and when: a pure function of the seed
cluster.py   runs a cluster for a while and injects the faults of a plan
run.py       what was done to the cluster, as plain values
disks.py     disks that can be filled
links.py     links that can be cut
goodput.py   how much work got through, and the longest time that a living worker stood still
losses.py    where the rest of the work went
result.py    all of it as numbers and words
timeline.py  all of it as a picture
command.py   the command, from the fault-free run to the exit code

The promises are judged by diloco_common/judge.py.
"""
