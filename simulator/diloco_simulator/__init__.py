"""Whole clusters in virtual time: the product in another world, where machines and networks misbehave.

options.py          what a schedule is like, drawn from its seed
timeline.py         virtual time: everything that happens, in one order
process.py          a process: an asyncio event loop in virtual time, and threads; it can be killed and frozen
network.py          calls and control streams that are lost, late, twice, cut, half-open
transport.py        `ports.Transport` over that network
disk.py             a disk that fails as disks do; shard_disk.py: one shard's, and what goes wrong with it
shard_process.py    host, service and store of the product in one process
learner_process.py  a learner of the product in one process, and a training loop; model.py: what it trains
hostile_process.py  a hostile learner in one process; plot.py, hostile.py, lies.py: what it knows, does and says
wire.py             the wire as a hostile learner meets it
fairness.py         what hostile learners may not get
silence.py          stands in for metrics and log
invariants.py       what must hold at any moment; `diloco_simulator.verify.judge` reads the histories
faults.py           what goes wrong, and when it is over
cluster.py          everything of one schedule; start here
runner.py           many schedules, in several processes
"""
