"""The shard's decisions as pure code: no sockets, threads, clocks, randomness or logging.

shard.py        the face that callers use; start here
leases.py       who may speak
membership.py   leases and generations themselves
rounds.py       when rounds open and close, and what becomes of a push
round.py        what one round has collected, and whether it may close
due.py          which fragments are due
cadence.py      how many inner steps lie between two rounds of a fragment
trust/          what is believed of a learner, and what follows
grace.py        how long a round stays open after its quorum
admission.py    the answer to a push, from its header
guards.py       what is refused before it can touch state
versions.py     seeding, restoring, committing and announcing versions
fragment.py     a fragment's state: its phase, its latest version, its round
record.py       what is kept with a version: how it came to be
budget.py       when the run has its tokens
merge.py        contributions -> one pseudo-gradient
outer.py        pseudo-gradient -> new version
arithmetic.py   a fragment's numbers: seeding, stepping and sending them
ledger.py       counts of everything that happened
effects.py      what the shell has to do next
"""
