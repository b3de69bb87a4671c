"""The learner's decisions and arithmetic as pure code: no sockets, threads, clocks, randomness or logging.

learner.py    what happens at a step boundary; start here
fragment.py   one fragment: anchor, residual, pending contribution, and how a version is laid under progress
replica.py    the user's model, seen as flat fragments
shards.py     which shards have joined, and whether they make up one run
pushes.py     under which lease a contribution may be pushed
events.py     what comes from the links, and the queue that it waits in
dialing.py    when to dial a shard again, and how soon
"""
