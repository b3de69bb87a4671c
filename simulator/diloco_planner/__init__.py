"""The planner: one model of links, memory, failures and costs, for `diloco plan` and `diloco simulate`.

plans.py      the question: learners with their links, and shards; and the outcome of a run
described.py  a run as described by a file: sites, machines, failures, prices
chips.py      chips that fail: when an island computes, and with how many of its chips
choice.py     the settings that suit a link and a number of learners; sizes.py: memory and traffic of a learner
proposed.py   ways to train that fit the sites, DiLoCo and three others; weigh.py picks the best, and says why
world.py      production cores in virtual time: steps, links, merges; weightless.py: their tensors hold no values

`plan` (plan_command.py, table.py) uses closed formulas (`diloco_common/formulas.py`) and loads no core; `simulate`
(simulate_command.py) runs the cores.
"""
