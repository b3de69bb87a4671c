"""Alerts of Prometheus. The wrapped lines are those of docs/runbook.md."""

from __future__ import annotations

from diloco_deploy.explain.codes import Entry, Kind

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


LEARNER_ALERTS = (
    Entry(
        "DilocoWorkerSilent",
        Kind.ALERT,
        """\
A learner was silent for longer than its lease, was evicted, and has not come back for a minute. Nobody waits for
it.""",
        """\
1. If the process is gone, start it again with the same learner id and folder. The alert ends.
2. If it is there, its log says why it cannot reach the shard. If one shard alone evicted it, look at that link.
3. If it is gone for good, do nothing. The alert ends after six hours. Without a learner id, each start leaves such an
   alert behind: set `worker.learner_id`.""",
    ),
    Entry(
        "DilocoWorkersMissing",
        Kind.ALERT,
        """\
For ten minutes, a shard has had fewer live learners than within the last hour. This alert also counts learners that
said goodbye and were not replaced.""",
        """\
1. Was it on purpose? Silence the alert; it ends after an hour.
2. Is it one shard only (`diloco_shard_learners{state="alive"}` by instance)? Then learners cannot reach it. Their logs
   say `CANNOT_CONNECT` or the refusal.
3. Which are missing? See *Learners* in the dashboard. Is there a machine for them (`kubectl get pods`, `squeue`, the
   quota of the cloud)?""",
    ),
    Entry(
        "DilocoWorkerStalled",
        Kind.ALERT,
        """\
A learner sends heartbeats but ends no inner step. Its data loader hangs, its GPU does not answer, or a collective of
the island waits for a dead rank.""",
        """\
Run `py-spy dump --pid` as root on its host to see which (containers may not trace). Restart the worker if it does not
recover. `lease.progress_timeout_s` evicts such learners by itself. Set it with `sync.quorum=all`, because rounds wait
for them.""",
    ),
    Entry(
        "DilocoLearnerQuarantined",
        Kind.ALERT,
        """\
A shard leaves a learner out. Of its last 16 contributions 8 were outliers: `NOT_FINITE`, `NORM_TOO_LARGE`, or more
than 6 times (strangers: 8 times) as long as the others of their round. What it pushes is refused with `QUARANTINED`,
for `guard.quarantine_s` at first, doubled each time up to tenfold. The log (`quarantined`) and `/status` say why.""",
        """\
1. Its loss is NaN, or far above the others': restart it, so that it begins with the global weights. If it happens
   again, look at its data, learning rate and memory (ECC errors).
2. Its loss is like the others': it does not train what it says. Does it run the same code and settings? If nobody
   answers for its machine, take its credentials away.
3. It was cut off for long, or is many times faster than the others: nothing to do. It is asked again by itself.
4. Half of the learners are out: something is wrong with all, or with the norm guard after a change of data, batch or
   learning rate. `guard.quarantine_s=0` switches the quarantine off.""",
    ),
    Entry(
        "DilocoQuorumNotMet",
        Kind.ALERT,
        """\
Fewer learners are alive than `sync.quorum` asks for, or a round has been open for 15 minutes. The run goes on with the
learners that are there.""",
        """\
1. Too few are alive: go on at [DilocoWorkerSilent](#dilocoworkersilent). Or the quorum is larger than the number of
   workers.
2. A round stays open: find the learner that has contributed least (*Learners, now* in the dashboard). It is stalled,
   or its link is too thin for a push ([WAN](wan.md)).""",
    ),
    Entry(
        "DilocoContributionsRejected",
        Kind.ALERT,
        """\
More than 5 % of the requested contributions are refused, with the code in the label. The work is late rather than
lost, unless it is refused every time.""",
        """\
[Errors](errors.md#what-a-shard-refuses) says what each code means. Where `WRONG_EPOCH`, `WRONG_ROUND` and `NOT_SEEDED`
come again and again, a shard restarts again and again.""",
    ),
    Entry(
        "DilocoStalenessHigh",
        Kind.ALERT,
        """\
A tenth of the accepted contributions is relative to versions older than half of `sync.staleness_max`. Beyond that
limit, they are refused.""",
        """\
Look for slow learners and slow pulls. A larger `sync.sync_every` helps everybody. To live with a slow learner, raise
`sync.staleness_max`.""",
    ),
    Entry(
        "DilocoDiskNearlyFull",
        Kind.ALERT,
        """\
The shard's disk has no room for one more version of every fragment (`shard:diloco_version_of_each:bytes`), or will
have none within four hours. A shard keeps two versions of each fragment, two files that are being written, and one
version for each regular checkpoint (`checkpoint.keep`).""",
        """\
1. What grows (*Free space* in the dashboard)? Look for checkpoints that nobody removes, or for other files.
2. The volume was too small from the start: stop the shard, enlarge the volume, and start it again.
3. If the disk is full already, see [DilocoVersionNotDurable](#dilocoversionnotdurable).""",
    ),
    Entry(
        "DilocoCheckpointFailing",
        Kind.ALERT,
        """\
A shard could not make a regular checkpoint (`checkpoint.every`). The run goes on, and the next version tries again.""",
        """\
The log line `checkpoint failed` has the reason: a full disk, a folder `checkpoints` that cannot be written to, or a
version file that somebody took away. Until then the newest checkpoint is an old one
(`diloco_shard_checkpoint_version`).""",
    ),
    Entry(
        "DilocoCertificateExpiresSoon",
        Kind.ALERT,
        """\
A certificate of a shard or a worker expires within 14 days: its own (`which="own"`), or the authority's
(`which="ca"`). What renews it, a month before the end, has stopped or was never set up.""",
        """\
1. `own`, and something renews: docker-compose (`docker-compose logs certs`), cert-manager (`kubectl describe
   certificate`), `diloco up`. Its log says why not.
2. `own`, and nobody renews (systemd, Slurm, your own loop): `diloco certs issue learner/ID` (or `shard/N` with its
   `--host`) where the authority is. Copy the folder over the old one. No restart is needed, except under systemd
   ([operations](operations.md#systemd)).
3. `ca`: all certificates end with it. Make an authority in another folder. Append its `ca.pem` to the old one in every
   `ca.pem`: both then hold. Issue everything anew, and take the old one out.

The alert for every process at once, while `diloco certs list` shows other dates: this machine's clock is wrong.""",
    ),
    Entry(
        "DilocoCertificateExpires",
        Kind.ALERT,
        """\
The same, with less than three days left. After that, calls end and no connection is made (`EXPIRED`,
`CERTIFICATE_EXPIRED`). Learners train on without the shards, and their work waits. Prometheus cannot scrape an expired
shard, which looks like [DilocoShardDown](#dilocosharddown).""",
        """\
Do the same at once.""",
    ),
)
