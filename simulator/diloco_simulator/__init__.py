"""Whole clusters in virtual time: the production cores, a network that misbehaves, and a judge.

options.py      what a schedule is like, drawn from its seed
timeline.py     virtual time, processes that crash and freeze, coroutines
network.py      calls and control streams that are lost, late, twice, cut, half-open
shard.py        a shard's shell around `diloco_server.core`
link.py         a learner's connection to one shard, as link.py, puller.py and pusher.py of diloco_worker
learner.py      a learner's shell around `diloco_worker.core`
truth.py        what really happened, seen from above
invariants.py   what must hold, one function each
faults.py       what goes wrong, and when it is over
cluster.py      everything of one schedule; start here
"""
