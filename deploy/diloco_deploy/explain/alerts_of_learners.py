"""Alerts of Prometheus about learners, contributions, disks and certificates."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind

LEARNER_ALERTS = (
    Entry(
        "DilocoWorkerSilent",
        Kind.ALERT,
        """\
A learner was silent for longer than its lease, was evicted, and has not come back for a minute. The others do not
wait for it.""",
        """\
1. Is the process there? If not, start it again with the same learner id and folder. It joins with a new generation,
   and the alert ends.
2. If it is there, its log says why it cannot reach the shard. If only one shard evicted it, look at the link to that
   shard.
3. If it is gone for good, there is nothing to do. The alert ends after six hours. A worker that ends on purpose says
   goodbye and never gets here. If no learner id was set, ids change with every start, and each start leaves such an
   alert behind. Set `worker.learner_id`.""",
    ),
    Entry(
        "DilocoWorkersMissing",
        Kind.ALERT,
        """\
For ten minutes, some shard has had fewer live learners than at some time within the last hour. Unlike
[DilocoWorkerSilent](#dilocoworkersilent), this alert also counts learners that said goodbye and were never replaced,
and learners that a shard no longer knows after its restart.""",
        """\
1. Was it on purpose, such as `--scale` or a smaller Job? Then the alert ends after an hour. Silence it until then.
2. Is it one shard only (`diloco_shard_learners{state="alive"}` by instance)? Then the learners cannot reach that
   shard. Their logs say `CANNOT_CONNECT` or the refusal.
3. Which learners are missing? *Learners* in the dashboard shows who left and who was evicted. Is there a machine for
   them? See `kubectl get pods` (Pending?), `squeue`, the quota of the cloud.""",
    ),
    Entry(
        "DilocoWorkerStalled",
        Kind.ALERT,
        """\
A learner sends heartbeats but ends no inner step. Its data loader hangs, its GPU does not answer, or a collective
inside the island waits for a dead rank.""",
        """\
Its stack shows which: run `py-spy dump --pid` as root on its host (images have no debugger, and containers may not
trace). Restart the worker if it does not recover. `lease.progress_timeout_s` evicts such learners by itself. With
`sync.quorum=all` it is worth setting, because rounds wait for them.""",
    ),
    Entry(
        "DilocoLearnerQuarantined",
        Kind.ALERT,
        """\
A shard leaves a learner out. Of its last 16 contributions 8 were outliers: `NOT_FINITE`, `NORM_TOO_LARGE`, or more
than 6 times (strangers: 8 times) as long as the others of their round. It is not asked and not waited for, and what
it pushes is refused with `QUARANTINED`. The log line `quarantined` and `/status` (`quarantine` of the learner) say why
and for how long:
`guard.quarantine_s` at first, doubled each time up to tenfold. Then it is on probation: two outliers put it out
again, 16 ordinary contributions clear it.""",
        """\
1. Look at its loss and its log. NaN, or a loss far above the others': it has diverged. Restart it, so that it begins
   with the global weights. If it happens again, look at its data, its learning rate, its memory (ECC errors).
2. Its loss is like the others', and it is quarantined all the same: it does not train what it says it trains. Does it
   run the same code and settings as the others? Whose machine is it? If nobody answers for it, take its credentials
   away.
3. It came back from a long time cut off, or is many times faster than the others: nothing to do. It is asked again by
   itself, and what it trained meanwhile is in its next contribution. To switch the quarantine off, set
   `guard.quarantine_s=0`.
4. Half of the learners are out: then something is wrong with all of them, or with the norm guard after a change of
   data, batch or learning rate. More than half are never left out.

Joining again, another process, or another address change nothing: it goes by the learner's id. A restarted shard
begins anew.""",
    ),
    Entry(
        "DilocoQuorumNotMet",
        Kind.ALERT,
        """\
Fewer learners are alive than `sync.quorum` asks for, or a round has been open for 15 minutes. Rounds close with the
learners that are there. The run goes on, but its merges hold fewer contributions than you asked for.""",
        """\
1. Too few are alive: go on at [DilocoWorkerSilent](#dilocoworkersilent). Or the quorum is larger than the number of
   workers.
2. Enough are alive, but a round stays open: find the learner that has contributed least in *Learners, now* of the
   dashboard. It is stalled, or its link needs longer than that for one push ([WAN](wan.md) has the arithmetic).""",
    ),
    Entry(
        "DilocoContributionsRejected",
        Kind.ALERT,
        """\
More than 5 % of the requested contributions are refused, with the code in the label. The learners keep that work and
send it with the next contribution. So it is late rather than lost, unless it is refused every time.""",
        """\
| code | look at |
| --- | --- |
| `NOT_FINITE`, `NORM_TOO_LARGE` | the loss of the learners: one diverges, or has broken memory. The log names it |
| `QUARANTINED` | [DilocoLearnerQuarantined](#dilocolearnerquarantined): a learner that is left out pushes anyway |
| `TOO_STALE` | [DilocoStalenessHigh](#dilocostalenesshigh) |
| `BAD_CHECKSUM` | the learner's machine or link damages bytes |
| `MANIFEST_MISMATCH`, `UNKNOWN_ENCODING` | a worker with another model, or another version of the software |
| `BAD_SIZE`, `BAD_ENCODING` | a worker with another version of the software |
| `WRONG_EPOCH`, `WRONG_ROUND`, `NOT_SEEDED` | a shard that restarts again and again |

[errors](errors.md) has all codes.""",
    ),
    Entry(
        "DilocoStalenessHigh",
        Kind.ALERT,
        """\
A tenth of the accepted contributions is relative to versions older than half of `sync.staleness_max`. Beyond that
limit, contributions are refused. Learners take too long from a version to the next contribution.""",
        """\
Look for slow learners, for slow pulls, and for rounds that follow each other too fast (a larger `sync.sync_every`
helps everybody). If you must live with a slow learner, raise `sync.staleness_max`.""",
    ),
    Entry(
        "DilocoDiskNearlyFull",
        Kind.ALERT,
        """\
The shard's disk has no room for one more version of every fragment, or will have none within four hours at the rate
of the last hour. The size depends on the model: `shard:diloco_version_of_each:bytes`. A shard keeps two versions of
each fragment, and two of those files while they are written. Each regular checkpoint (`checkpoint.keep`) holds on to
one more.""",
        """\
1. What grows? See *Free space* in the dashboard. A shard does not grow beyond that. So look for checkpoints that
   nobody removes, or for other files on the same disk.
2. The volume was too small from the start: stop the shard, make the volume larger, and start the shard. It comes back
   with all its versions.
3. If the disk is full already, see [DilocoVersionNotDurable](#dilocoversionnotdurable).""",
    ),
    Entry(
        "DilocoCheckpointFailing",
        Kind.ALERT,
        """\
A shard could not make a regular checkpoint (`checkpoint.every`). The run itself goes on, and the next version tries
again.""",
        """\
The log line `checkpoint failed` has the reason: a full disk, a folder `checkpoints` that the shard may not write to,
or a version file that somebody took away. Until you solve it, the newest checkpoint is an old one: see
`diloco_shard_checkpoint_version`.""",
    ),
    Entry(
        "DilocoCertificateExpiresSoon",
        Kind.ALERT,
        """\
A certificate of a shard or a worker expires within 14 days. `which` says whether it is its own, or that of the run's
authority (`ca`). Whatever renews it does so a month before the end, so it has stopped, or was never set up.""",
        """\
1. `which="own"`, and something renews: docker-compose (`docker-compose logs certs`), cert-manager (`kubectl describe
   certificate`), `diloco up` (it does so while it runs). Its log says why not.
2. Nobody renews by itself: systemd, Slurm, your own loop. Where the authority is, `diloco certs issue learner/ID` (or
   `shard/N` with its `--host`), and copy the folder over the one that is there. It is read again without a restart,
   except under systemd ([operations](operations.md#systemd)).
3. `which="ca"`: all certificates of the run end with it. Make an authority in another folder, write its `ca.pem`
   behind the old one in every `ca.pem` (both then hold), issue everything anew, and take the old one out.

The same alert for every process at once, and `list` shows other dates: the clock of this machine is wrong.""",
    ),
    Entry(
        "DilocoCertificateExpires",
        Kind.ALERT,
        """\
The same, with less than three days left. After that no connection is made with it any more, and open calls end
(`EXPIRED`, `CERTIFICATE_EXPIRED`, [errors](errors.md)). Learners go on training without the shards, and their work
waits. So does Prometheus: a shard whose certificate has expired cannot be scraped, which looks like
[DilocoShardDown](#dilocosharddown).""",
        """\
Do the same at once.""",
    ),
)
