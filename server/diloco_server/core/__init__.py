"""The shard's decisions as pure code: no sockets, threads, clocks, randomness or logging.

shard.py        the state machine that ties the rest together; start here
membership.py   leases and generations: who may contribute
cadence.py      when a fragment is due
rounds.py       what a round has collected, and whether it may close
grace.py        how long a round stays open after its quorum
guards.py       what is refused before it can touch state
merge.py        contributions -> one pseudo-gradient
outer.py        pseudo-gradient -> new version
fragment.py     a fragment's state, and the arithmetic of seeding and stepping it
ledger.py       counts of everything that happened
effects.py      what the shell has to do next
"""
