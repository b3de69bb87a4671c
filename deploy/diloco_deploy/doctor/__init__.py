"""`diloco doctor`: checks a learner's connection to the shards, or a shard's machine, and names the problems."""
