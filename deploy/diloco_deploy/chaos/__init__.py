"""`diloco chaos`: run a local cluster, hurt it by a seeded plan, and check the promises on what every process recorded.

plan.py       what is done to whom and when: a pure function of the seed
cluster.py    runs a cluster for a while and carries the plan out
disks.py      disks that can be filled
links.py      links that can be cut
histories.py  what the processes recorded, life by life, and which merges took effect
checks.py     the promises, as pure functions of histories
goodput.py    how much work came through, and the longest that a living worker stood still
account.py    where the rest of it went
result.py     all of it as numbers and words
timeline.py   all of it as a picture
command.py    the command, from the fault-free run to the exit code
"""
