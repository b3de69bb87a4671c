"""One model of a cluster: its members, their state, and since when. Every display of a run is a view of it.

`asking.py` asks processes and `reading.py` checks their answers. The rest is pure: `members.py` models one shard or
worker over all of its processes, and one learner over all shards; `model.py` the cluster; `roll_call.py` compares
present members with expected ones, as `diloco up` writes them down.
"""
