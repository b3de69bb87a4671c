"""Whole clusters in virtual time: the product in a world where machines and networks misbehave.

options.py          the properties of a schedule, drawn from its seed
world/              virtual time, processes and threads (process.py), calls that get lost (network.py), the transport
                    and the wire that hostile learners use (transport.py), disks that fail (disk.py), the shared
                    state and model (stage.py)
shard_process.py    host, service and store of the product in one process
learner_process.py  a learner of the product in one process, and a training loop; island_process.py: all ranks of one;
                    followed.py: the code that both share; reader_processes.py: mirrors and standbys
processes.py        the processes of a schedule, and everything that can be done to them
hostile.py          the acts of hostile learners; lies.py: what they know, plan and say, and what a sick member sends
verify/             checks of the state at any moment (invariants.py), of histories (histories.py, judge.py), of
                    members' versions (published.py), and of members' and hostile learners' influence (bounded.py)
cluster.py          one whole schedule, with its faults; start reading here
__main__.py         the command: many schedules, in several processes
"""
