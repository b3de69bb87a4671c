"""What a shard refuses: calls, and contributions."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind


def _call(code: str, status: str, means: str, do: str, look: str = "", also: str = "", exit_code: int = 6) -> Entry:
    return Entry(code, Kind.CALL, means, do, look, status, exit_code, also)


def _rejected(code: str, means: str, do: str, look: str = "", also: str = "") -> Entry:
    return Entry(code, Kind.CONTRIBUTION, means, do, look, also=also, exit_code=6)


AGAIN = "Nothing: the learner tries again by itself."
JOINS = "Nothing: the learner joins again by itself."

CALLS = (
    _call(
        "UNAUTHENTICATED", "UNAUTHENTICATED", "The call has no certificate or token, or a wrong one.",
        "Give the caller the token that the shard asks for.", "`security.token_file` (`token=` of join) on both sides",
    ),
    _call(
        "WRONG_IDENTITY", "PERMISSION_DENIED",
        "The certificate or signed token is of somebody else than the call says, or of another run.",
        "Use the caller's own certificate or token.", "`worker.learner_id`, `run.id`, and whom `cert.pem` names",
    ),
    _call(
        "WRONG_SCOPE", "PERMISSION_DENIED", "The scope of the caller does not have this call.",
        "Use a certificate of the right scope: only learners train.", "[who may call](deploy.md#who-may-call)",
    ),
    _call(
        "REVOKED", "UNAUTHENTICATED", "The certificate or signed token is on the deny-list.",
        "Ask who runs the run for another one.", "`diloco certs list`, where the authority is",
    ),
    _call(
        "EXPIRED", "UNAUTHENTICATED", "The certificate or signed token has expired.",
        "Issue another. Workers read it without a restart.", "`diloco certs list`, and the clocks of both machines",
    ),
    _call(
        "WRONG_RUN", "FAILED_PRECONDITION", "The shard belongs to another run.",
        "Give the caller the run's id, or the address of the run's shards.", "`run.id` on both sides, `worker.shards`",
    ),
    _call(
        "PROTOCOL_MISMATCH", "FAILED_PRECONDITION", "Caller and shard speak different versions of the protocol.",
        "Install equal versions on both sides.", "`diloco --version` on both machines",
    ),
    _call(
        "BAD_LEARNER_ID", "INVALID_ARGUMENT", "The learner id is not 1 to 64 of `A-Z a-z 0-9 . _ -`.",
        "Choose another id.", "`worker.learner_id` (`learner_id=` of join)",
    ),
    _call(
        "BAD_REQUEST", "INVALID_ARGUMENT",
        "The call breaks the protocol, or a field is beyond its [limit](wire-format.md#limits). "
        "The message names field, value and limit.",
        "Install equal versions on both sides. If they are equal, it is a bug: please file an issue.",
        "the message",
    ),
    _call(
        "MANIFEST_MISMATCH", "FAILED_PRECONDITION",
        "The model differs from that of the run, or is cut differently; the first differences are listed. Or the shard "
        "insists on another model; both digests are given.",
        "Start every worker with the same model and the same code.",
        "the differences in the message; `run.model`, `sync.fragments`", also="rejected contributions",
    ),
    _call(
        "FROZEN_MISMATCH", "FAILED_PRECONDITION",
        "Frozen parameters, or packed weights of quantised layers, differ from those of this run; the first are named.",
        'Load the same base in the same dtype, or `join(..., frozen="any")`. If your loop changes them itself (a '
        'teacher, a target network), `join(..., private=[...])` keeps them local, and `shared="all"` merges them, too.',
        "the base model that each worker loads",
    ),
    _call(
        "NOT_JOINED", "FAILED_PRECONDITION", "The learner has no lease here, or the shard has restarted since.", JOINS,
    ),
    _call(
        "LEASE_EXPIRED", "FAILED_PRECONDITION", "The learner was silent for longer than its lease.",
        JOINS + " If it happens often, raise `lease.lease_s` above the usual outages.", "`lease.lease_s`, the link",
    ),
    _call(
        "STALLED", "FAILED_PRECONDITION",
        "The learner sent heartbeats, but took no inner step for longer than `lease.progress_timeout_s`.",
        "The learner joins again by itself. Find what its loop waits for.",
        "[DilocoWorkerStalled](runbook.md#dilocoworkerstalled)",
    ),
    _call(
        "STALE_GENERATION", "FAILED_PRECONDITION",
        "The learner has joined again since; what its earlier life sends is no longer taken.", "Nothing.",
    ),
    _call(
        "SUPERSEDED", "FAILED_PRECONDITION",
        "Another process has joined with the same learner id. This one ends once most of its shards say so.",
        "Give each worker an id of its own, or end the one that is too many.", "`worker.learner_id`", exit_code=4,
    ),
    _call("DRAINING", "UNAVAILABLE", "The shard is shutting down.", "Nothing: the call is tried again."),
    _call(
        "BUSY", "RESOURCE_EXHAUSTED", "Too many pushes, pulls, joins, learners or bytes at once.",
        "Nothing: the call is tried again. If it stays so, raise the limit that the message names.",
        "[limits](operations.md#limits)",
    ),
    _call(
        "TORN_UPLOAD", "UNAVAILABLE",
        "The bytes of a push stopped coming or came too slowly, or a later push of the learner took its place.",
        "Nothing: the push is tried again. If it stays so, the link is too thin.",
        "`diloco doctor` on the learner's machine",
    ),
    _call(
        "NOT_SEEDED", "FAILED_PRECONDITION", "The fragment has no version yet.", AGAIN, also="rejected contributions",
    ),
    _call(
        "UNKNOWN_FRAGMENT", "NOT_FOUND", "Another shard owns the fragment, or there is none of that number.",
        "Give workers the addresses of all shards of one run.", "`worker.shards`, `shard.count`",
        also="rejected contributions",
    ),
    _call(
        "VERSION_GONE", "NOT_FOUND", "The shard no longer holds the version that a pull names.",
        "Nothing: the learner pulls the latest.",
    ),
    _call(
        "UNKNOWN_ENCODING", "INVALID_ARGUMENT", "Not an encoding of this run; the accepted ones are listed.",
        "Install what is missing on the caller's side, or change `sync.push` or `sync.pull`.",
        "`sync.push`, `sync.pull`, installed plugins", also="rejected contributions",
    ),
    _call(
        "REFUSED", "UNKNOWN", "A shard refuses with a code that this build does not know, so the shard is newer.",
        "Do what the message says. Install equal versions on both sides.", "`diloco --version` on both machines",
    ),
)  # fmt: skip
"""A call ends with one of these."""

REJECTIONS = (
    _rejected(
        "WRONG_EPOCH", "Relative to a version that was lost when the shard was restored.",
        "Nothing: the learner pulls first.", "[DilocoVersionsLost](runbook.md#dilocoversionslost)",
    ),
    _rejected("WRONG_ROUND", "The round is not open, or did not ask this learner.", "Nothing: the work is carried."),
    _rejected(
        "TOO_STALE", "Relative to a version older than `sync.staleness_max`.",
        "The work is carried. If it happens often, raise `sync.sync_every` or `sync.staleness_max`.",
        "[DilocoStalenessHigh](runbook.md#dilocostalenesshigh)",
    ),
    _rejected(
        "BAD_SIZE", "Sizes do not fit the fragment, the encoding or the header.",
        "Install equal versions on both sides.", "`diloco --version` on both machines",
    ),
    _rejected(
        "BAD_CHECKSUM", "A checksum does not fit the bytes: they changed on the way.",
        "The push is repeated with the next round. If it stays so, the learner's machine or link damages bytes.",
        "memory and network of the learner's machine",
    ),
    _rejected(
        "BAD_ENCODING", "Not a valid payload: a scale of 0, NaN or inf, for example.",
        "Install equal versions on both sides.", "`diloco --version` on both machines",
    ),
    _rejected(
        "CONTRIBUTION_CONFLICT", "The same contribution came before with other bytes.",
        "Give each worker an id of its own. Otherwise it is a bug: please file an issue.", "`worker.learner_id`",
    ),
    _rejected(
        "NOT_FINITE", "NaN, infinite, or so large that squares overflow.",
        "Restart the learner if it has diverged: it begins with the global weights.", "the learner's loss and memory",
        also="ends a learner whose NaN were refused by five rounds in a row (of an island: five rounds, whatever the "
        "number of ranks): begin again with a new optimizer",
    ),
    _rejected(
        "NORM_TOO_LARGE",
        "The norm is far above what others sent for as many steps. With nobody to compare with, and among strangers: "
        "above `guard.norm_factor` times the usual one, the median over the learners of the fragment.",
        "Restart the learner if it has diverged, and look at its memory. Among strangers, if all are refused, raise "
        "`guard.norm_factor`.",
        "the learner's loss and learning rate",
    ),
    _rejected(
        "QUARANTINED",
        "This learner's contributions were outliers again and again. The message says for how long nothing of it is "
        "merged.",
        "Restart it if it has diverged. It is asked again by itself.",
        "its loss, data and memory; [DilocoLearnerQuarantined](runbook.md#dilocolearnerquarantined)",
    ),
    _rejected(
        "IMPLAUSIBLE",
        "More tokens or steps than the learner has reported since it was merged last, and can have trained since.",
        "Nothing after a long absence: the limit grows with time, and the work is taken soon. Else find out who runs "
        "that learner.",
        "tokens and steps that the loop gives to `learner.step`",
    ),
)  # fmt: skip
"""A push is answered REJECTED with one of these, or with one of the calls' codes that say so."""
