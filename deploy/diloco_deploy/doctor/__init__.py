"""`diloco doctor`: looks at a learner's way to the shards, or at a shard's machine, and names what is wrong."""
