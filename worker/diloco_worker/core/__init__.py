"""The learner's decisions and arithmetic as pure code: no sockets, threads, clocks, randomness or logging.

learner.py     what happens at a step boundary; start here
fragment.py    one fragment: its version, the round that asks for it, the contribution that is under way
tensors.py     all that is as large as the fragment, and how a version gets into the model
replica.py     the user's model, seen as flat fragments: of each kind, in parameters.py, momentum.py and buffers.py
parts.py       what one process holds of a fragment, and pushes
shared_set.py  which tensors are shared, under which names (names.py)
agreement.py   which shards have joined, and whether they make up one run
connection.py  what is known of one shard: lease, and the versions to pull
dialing.py     when to dial a shard again, and how soon
events.py      what comes from the connections, and the queue that it waits in
acts.py        what a step boundary asks for
council_log.py  how several ranks come to the same decisions
"""
