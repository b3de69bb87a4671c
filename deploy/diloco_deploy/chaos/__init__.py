"""`diloco chaos`: run a local cluster, inject faults by a seeded plan, and judge what every process recorded.

plan.py      the targets and times of the faults: a pure function of the seed
cluster.py   runs a cluster for a while and injects the faults of a plan
run.py       the injected faults, and how the run ended, as plain values
disks.py     disks that can be filled
links.py     network links that can be cut
goodput.py   how much work got through, and the longest pause of a living worker
losses.py    where the rest of the work went
hostile.py   a hostile learner beside them; harm.py: what it got out of the run
result.py    the result as numbers and words
timeline.py  the result as a picture
command.py   the command, from the fault-free run to the exit code

diloco_simulator/verify/judge.py judges whether the promises were kept.
"""
