"""The built-in training of `diloco-worker`: a small GPT over bytes, its data, schedule, loop and checkpoint.

Knows nothing of shards or the network: it trains, and calls a `Synchroniser` after every inner step.
"""
