"""The planner: one model of links, memory, failures and money, for `diloco plan` and `diloco simulate`.

plans.py       what is asked: learners with their links, and shards; and what a run came to
described.py   a run as a file says it: sites, machines, failures, prices
chips.py       chips that fail: when an island computes, and with how many of its chips
money.py       what a run costs
choice.py      the settings that suit a link and a number of learners
proposed.py    ways to train that fit the sites, and what each comes to; weigh.py names the best, and says why
ways.py        four ways to train, over the same failures
world.py       production cores in virtual time: steps, links, merges; weightless.py: their tensors weigh nothing
published.py   published figures, and what the planner makes of their inputs

`plan` answers by closed formulas (`diloco_common/formulas.py`) and loads no core; `simulate` runs the cores.
"""
