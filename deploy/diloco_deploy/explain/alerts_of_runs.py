"""Alerts of Prometheus about the run and its shards. The wrapped lines are those of docs/runbook.md."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind

RUN_ALERTS = (
    Entry(
        "DilocoNoProgress",
        Kind.ALERT,
        """\
A shard has merged no token for 15 minutes, and the run's budget is not reached.""",
        """\
1. Does the shard have learners (`diloco_shard_learners{state="alive"}`)? If not, look at the workers' logs.
   `CANNOT_CONNECT` means the network. `refused` names its reason ([errors](errors.md)).
2. Is `diloco_shard_open_rounds` above 0 for long? Go on at [DilocoQuorumNotMet](#dilocoquorumnotmet). If it is 0,
   learners take no steps (`diloco_shard_learner_inner_step` stands still), or H steps take longer than the alert's
   window. Then make the window longer.
3. Do rounds close without a new version? The shard's log says `version not durable`
   ([DilocoVersionNotDurable](#dilocoversionnotdurable)) or `job failed` (a bug).""",
    ),
    Entry(
        "DilocoShardDown",
        Kind.ALERT,
        """\
Prometheus gets no answer from a shard, or its `/readyz` says no: `draining`, `recovering`, `storage`.""",
        """\
1. Is the process there (`kubectl get pods`, `docker-compose ps`, `systemctl status`)? Exit code 2 is a wrong setting,
   3 a damaged data folder, 4 a port or folder in use. The last line of its log says which.
2. Start it again **with its data folder**. It comes back with every version that anybody has seen.
3. If the folder is gone, start the shard empty. The learners seed it. Its outer momentum is lost, which makes the loss
   a little worse for some rounds.""",
    ),
    Entry(
        "DilocoShardRestarting",
        Kind.ALERT,
        """\
A shard was started more than twice within 15 minutes: it dies soon after each start.""",
        """\
The end of its previous log says why: `docker-compose logs`, `kubectl logs --previous`, `journalctl -u`. Exit code 137
without a message means a memory limit ([how much it needs](performance.md#memory-of-a-shard)). Learners train on.""",
    ),
    Entry(
        "DilocoShardMissing",
        Kind.ALERT,
        """\
Prometheus finds fewer shards than the run has: a pod was never scheduled, or a container does not exist.""",
        """\
Look at what should run it (`kubectl describe statefulset`). The usual cause is a pending PersistentVolumeClaim. The
alert remembers the expected number for an hour.""",
    ),
    Entry(
        "DilocoVersionNotDurable",
        Kind.ALERT,
        """\
The disk refuses a version, or has written nothing for ten minutes while versions wait. Learners train on, and rounds
wait. Nothing is lost so far.""",
        """\
1. The log line `version not durable` has the system's own message.
2. No space: free some. A shard keeps the last two versions of a fragment; nothing else in its folder grows. It goes on
   within a second.
3. A broken disk: stop the shard, copy its folder to another disk, and start it there.
4. A slow disk: see `diloco_shard_save_seconds`. Durability by interval is faster, but loses the last versions in a
   crash.""",
    ),
    Entry(
        "DilocoVersionsLost",
        Kind.ALERT,
        """\
A shard came back with older versions than learners hold. Its folder was [restored from a
copy](upgrades.md#restoring-one-shard), the disk lied about writing, or durability is by interval. The run goes on from
the older versions.""",
        """\
The log line `versions lost` says how many. Find out which of the three it was before the next crash. Most of that work
lives on in the learners.

`recovered=0`: the files of that fragment are gone, or the shard keeps none (`shard.data_dir`). A learner has brought
its values as version 0. The outer momentum builds up again. If it matters more than the rounds since, end the shard,
put the last checkpoint back (`diloco restore`), and start it again.""",
    ),
)
