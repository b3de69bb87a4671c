"""The shard's decisions as pure code: no sockets, threads, clocks, randomness or logging.

shard.py        the face that callers use; start here
mirrored.py     the same of a mirror, which makes no versions
membership.py   who may speak: leases and generations
taking.py       what becomes of a push
rounds.py       when rounds open and close
patience.py     how long an open round waits, and for whom
round.py        what one round has collected, and whether it may close
due.py          which fragments are due
cadence.py      how many inner steps lie between two rounds of a fragment, and how long one stays open after its quorum
every.py        H, where the settings leave it to the shard
influence.py    how much one contribution may move the model
directions.py   where contributions point
arrivals.py     when a learner that was asked will have contributed
admission.py    the answer to a push, and what is refused, by its header
model.py        what learners must have in common
versions.py     seeding, restoring, committing and announcing versions; when the run has its tokens
fragment.py     a fragment's state: its phase, its latest version, its round
record.py       what is kept with a version: how it came to be
parts.py        contributions that come in parts
merge.py        contributions -> one pseudo-gradient, or the next values of buffers
outer.py        pseudo-gradient -> new version
arithmetic.py   a fragment's numbers: seeding, stepping and sending them
ledger.py       what has happened, and the account of it
effects.py      what the shell has to do next
"""
