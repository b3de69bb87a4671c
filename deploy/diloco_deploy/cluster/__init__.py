"""One model of a cluster: who is there, since when, and how it is. All that people see of a run is a view of it.

`reading.py` takes in what a process says, `asking.py` asks. The rest is pure: `members.py` is one shard or worker over
all of its processes, `learners.py` one learner over all shards, `model.py` the cluster, `roll_call.py` who ought to be
there, and `record.py` what `diloco up` writes down of its processes.
"""
