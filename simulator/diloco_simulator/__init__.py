"""Whole clusters in virtual time: the product in a world where machines and networks misbehave.

options.py          the properties of a schedule, drawn from its seed
world/              virtual time, processes and threads (process.py), calls that get lost (network.py, transport.py),
                    disks that fail (disk.py), the wire as hostile learners meet it, the shared state (stage.py)
shard_process.py    host, service and store of the product in one process
learner_process.py  a learner of the product in one process, and a training loop; island_process.py: all ranks of one;
                    followed.py: the code that both share
processes.py        the processes of a schedule, and everything that can be done to them
chaos/              faults, and when they end (faults.py); a sick member (sickness.py); the knowledge, acts and
                    messages of hostile learners
verify/             checks at any moment (invariants.py), on histories (histories.py, judge.py), against hostile
                    learners (fairness.py), of members' versions (published.py), and of how much members count for
                    (bounded.py)
cluster.py          one whole schedule; start here
runner.py           many schedules, in several processes
"""
