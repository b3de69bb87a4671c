"""The training of `diloco-worker`: a small GPT over bytes, its data, schedule, loop and checkpoint.

A user's script could look the same: of `diloco_worker`, it uses only what docs/api.md shows. `cli.py` joins; the other
modules know neither shards nor the network, and the loop calls a `Synchroniser` after every inner step.
"""
