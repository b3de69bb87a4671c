"""The shard's decisions as pure code: no sockets, threads, clocks, randomness or logging.

shard.py        the state machine that ties the rest together; start here
membership.py   leases and generations: who may contribute
cadence.py      when a fragment is due
budget.py       when the run has its tokens
rounds.py       what a round has collected, and whether it may close
grace.py        how long a round stays open after its quorum
admission.py    what becomes of a push
guards.py       what is refused before it can touch state
merge.py        contributions -> one pseudo-gradient
outer.py        pseudo-gradient -> new version
arithmetic.py   a fragment's numbers: seeding, stepping and sending them
record.py       what is kept of how a version came to be
fragment.py     a fragment's state
ledger.py       counts of everything that happened
effects.py      what the shell has to do next
"""
