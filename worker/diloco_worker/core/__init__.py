"""The learner's decisions and arithmetic as pure code: no sockets, threads, clocks, randomness or logging.

learner.py    what happens at a step boundary; start here
fragment.py   one fragment: anchor, residual, pending contribution, and how a version is laid under progress
replica.py    the user's model, seen as flat fragments
events.py     what comes from the links, and the queue that it waits in
dialing.py    when to dial a shard again, and how soon
"""
