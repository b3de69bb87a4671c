"""Alerts of Prometheus about the run and its shards. The wrapped lines are those of docs/runbook.md."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind

RUN_ALERTS = (
    Entry(
        "DilocoNoProgress",
        Kind.ALERT,
        """\
A shard has merged no token for 15 minutes (ten minutes without one, for five minutes), and the run's budget is not
reached.""",
        """\
1. Does the shard have learners? See `diloco_shard_learners{state="alive"}`. If there are none, look at the workers'
   logs. `CANNOT_CONNECT` means the network. `refused` names its reason ([errors](errors.md)).
2. Are rounds open? If `diloco_shard_open_rounds` is above 0 for long, go on at
   [DilocoQuorumNotMet](#dilocoquorumnotmet). If it is 0, learners take no steps (`diloco_shard_learner_inner_step`
   stands still), or H inner steps take longer than the alert's window. Then make the window longer.
3. Do rounds close without a new version? The shard's log says why: `version not durable`
   ([DilocoVersionNotDurable](#dilocoversionnotdurable)) or `job failed`, which is a bug.""",
    ),
    Entry(
        "DilocoShardDown",
        Kind.ALERT,
        """\
Prometheus gets no answer from a shard, or `/readyz` says no. The body of `/readyz` names the reason: `draining`,
`recovering`, `storage`.""",
        """\
1. Is the process there? See `kubectl get pods`, `docker-compose ps`, `systemctl status`. Exit code 2 is a wrong
   setting, 3 a damaged data folder, 4 a port or a data folder in use. The last line of its log says which.
2. Start it again **with its data folder**. It comes back with every version that anybody has seen. Learners join by
   themselves.
3. If the folder is gone, start the shard empty. The learners that are there seed it from the version they applied
   last. Its outer momentum is lost, which makes the loss a little worse for some rounds.""",
    ),
    Entry(
        "DilocoShardRestarting",
        Kind.ALERT,
        """\
A shard was started more than twice within 15 minutes. It dies soon after each start, too soon to count as *down*.""",
        """\
The last lines of its previous log say why: `docker-compose logs`, `kubectl logs --previous`, `journalctl -u`. Exit
code 137 without a message means that it hit the memory limit of the kernel or the cluster
([performance](performance.md) says how much memory a shard needs). Learners train on meanwhile.""",
    ),
    Entry(
        "DilocoShardMissing",
        Kind.ALERT,
        """\
Prometheus finds fewer shards than the run has. The missing shard has no target that could be down: its pod was never
scheduled, or its container does not exist.""",
        """\
Look at whatever should run it, for example with `kubectl describe statefulset`. The usual cause is a pending
PersistentVolumeClaim. If every shard is away at once, this alert fires: the expected number is remembered for an
hour.""",
    ),
    Entry(
        "DilocoVersionNotDurable",
        Kind.ALERT,
        """\
The disk refuses a version, or has written nothing for ten minutes while versions wait. A version is not announced
until it is on disk, so learners train on and rounds wait. Nothing is lost so far.""",
        """\
1. The log line `version not durable` has the system's own message: no space left, read-only file system, input/output
   error.
2. No space: free some. A shard keeps the last two versions of a fragment, and nothing else in its folder grows. It
   goes on by itself within a second.
3. A broken disk: stop the shard (it cannot finish anything), copy its folder to another disk, and start it there.
4. A disk that is only slow: see `diloco_shard_save_seconds`. Durability by interval is faster, but loses the last
   versions before a crash.""",
    ),
    Entry(
        "DilocoVersionsLost",
        Kind.ALERT,
        """\
A shard came back with older versions than learners hold. Either its folder was [restored from a
copy](upgrades.md#restoring-one-shard), or the disk lied about writing, or durability is by interval. The run goes on
from the older versions.""",
        """\
The log line `versions lost` says how many are lost. Find out which of the three it was before the next crash. The
work of those rounds is gone from the global model, though most of it lives on in the learners.

If the line says `recovered=0`, nothing of that fragment came back. Its files are gone, or the shard keeps none
(`shard.data_dir`). A learner has brought its own values as the new version 0, so there is nothing to do for the
values. The momentum of the outer optimizer is gone, and builds up again. If that momentum matters more than the
rounds since, end the shard, put the last checkpoint back (`diloco restore`), and start it again.""",
    ),
)
