"""The built-in training of `diloco-worker`: a small GPT over bytes, its data, schedule, loop and checkpoint.

It knows neither shards nor the network. It trains, and calls a `Synchroniser` after every inner step.
"""
