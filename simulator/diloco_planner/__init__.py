"""The planner: production cores in a world of durations and sizes, at any number of chips.

chips.py       chips that fail: when an island computes, and with how many of its chips
ways.py        four ways to train, over the same failures
weightless.py  shard and learner cores whose tensors weigh nothing
plans.py       what is asked: learners with their links, and shards
world.py       the cores in virtual time: steps, links, merges
described.py   a run as a file says it: sites, machines, failures, prices
published.py   published figures, and what the planner makes of their inputs
"""
