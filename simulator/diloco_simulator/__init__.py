"""Whole clusters in virtual time: the product in another world, where machines and networks misbehave.

options.py          what a schedule is like, drawn from its seed
world/              virtual time, processes and threads (process.py), calls that get lost (network.py, transport.py),
                    disks that fail (disk.py), the wire as hostile learners meet it, what processes share (stage.py)
shard_process.py    host, service and store of the product in one process
learner_process.py  a learner of the product in one process, and a training loop; island_process.py: all ranks of one;
                    followed.py: what both have in common
processes.py        those of a schedule, and all that can be done to them
chaos/              what goes wrong, and when it is over (faults.py); what hostile learners know, do and say
verify/             what must hold at any moment (invariants.py), what histories must tell (judge.py), what hostile
                    learners may not get (fairness.py), what members' versions must be (published.py)
cluster.py          everything of one schedule; start here
runner.py           many schedules, in several processes
"""
