"""The shard's decisions as pure code: no sockets, threads, clocks, randomness or logging.

shard.py        the interface that callers use; start here
membership.py   leases and generations: which learners may call
taking.py       accepts, holds or refuses each push
rounds.py       opens and closes rounds
patience.py     how long an open round waits, and for which learners
round.py        the contributions of one round, and whether it may close
due.py          which fragments are due for a round; chooses H when sync.sync_every is "auto"
influence.py    limits how much one contribution may move the model
arrivals.py     predicts when a learner's contribution will arrive
admission.py    answers a push from its header
model.py        checks that learners train the same model
versions.py     seeds, restores, commits and announces versions; ends the run at its token budget
fragment.py     the state of one fragment: its phase, latest version and round
record.py       the record kept with each version
parts.py        contributions that arrive in parts
merge.py        merges contributions into one pseudo-gradient, or into the next values of buffers
outer.py        the outer optimizers
arithmetic.py   seeding, stepping and encoding a fragment's values
ledger.py       the facts about a run, and their totals
effects.py      work that the core hands to the shell
"""
