"""The learner's decisions and arithmetic as pure code: no sockets, threads, clocks, randomness or logging.

learner.py     what happens at a step boundary; start here
fragment.py    one fragment: its version, the round that asks for it, the contribution in flight
tensors.py     the tensors as large as a fragment, and how a version gets into the model
replica.py     the user's model as flat fragments; one file per kind: parameters.py, momentum.py and buffers.py;
               copies.py where the optimizer steps on copies
parts.py       the part of a fragment that one process holds and pushes
shared_set.py  which tensors are shared, under which names (names.py)
agreement.py   which shards have joined, and whether they form one run
connection.py  the learner's knowledge of one shard: lease, versions to pull, and when to dial it again
events.py      values between threads: events from the connections, and acts of a step boundary
council_log.py  how several ranks come to the same decisions
"""
