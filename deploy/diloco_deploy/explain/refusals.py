"""What a shard refuses: calls, and contributions."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind


def _call(code: str, status: str, means: str, do: str, look: str = "", also: str = "", exit_code: int = 6) -> Entry:
    return Entry(code, Kind.CALL, means, do, look, status, exit_code, also)


def _rejected(code: str, means: str, do: str, look: str = "", also: str = "") -> Entry:
    return Entry(code, Kind.CONTRIBUTION, means, do, look, also=also, exit_code=6)


AGAIN = "Nothing: the learner tries again."
JOINS = "Nothing: the learner joins again."
EQUAL = "Install equal versions."
VERSIONS = "`diloco --version` on both machines"

CALLS = (
    _call(
        "UNAUTHENTICATED", "UNAUTHENTICATED", "The call has no certificate or token, or a wrong one.",
        "Give the caller what the shard asks for.", "`security.token_file` (`token=` of join) on both sides",
    ),
    _call(
        "WRONG_IDENTITY", "PERMISSION_DENIED",
        "The certificate or token names somebody else than the call, or another run.",
        "Use the caller's own.", "`worker.learner_id`, `run.id`, and whom `cert.pem` names",
    ),
    _call(
        "WRONG_SCOPE", "PERMISSION_DENIED", "The caller's scope does not have this call.",
        "Use a certificate of the right scope.", "[who may call](deploy.md#who-may-call)",
    ),
    _call(
        "REVOKED", "UNAUTHENTICATED", "The certificate or token is on the deny-list.",
        "Ask who runs the run for another one.", "`diloco certs list`, where the authority is",
    ),
    _call(
        "EXPIRED", "UNAUTHENTICATED", "The certificate or token has expired.",
        "Issue another. Workers read it without a restart.", "`diloco certs list`; both clocks",
    ),
    _call(
        "WRONG_RUN", "FAILED_PRECONDITION", "The shard belongs to another run.",
        "Correct the run's id, or the addresses.", "`run.id` on both sides, `worker.shards`",
    ),
    _call(
        "PROTOCOL_MISMATCH", "FAILED_PRECONDITION", "Caller and shard speak different versions of the protocol.",
        EQUAL, VERSIONS,
    ),
    _call(
        "BAD_LEARNER_ID", "INVALID_ARGUMENT", "The learner id is not 1 to 64 of `A-Z a-z 0-9 . _ -`.",
        "Choose another id.", "`worker.learner_id` (`learner_id=` of join)",
    ),
    _call(
        "BAD_REQUEST", "INVALID_ARGUMENT",
        "The call breaks the protocol, or a field is beyond its [limit](wire-format.md#limits); the message names it.",
        EQUAL + " If they are equal, please file an issue.", "the message",
    ),
    _call(
        "MANIFEST_MISMATCH", "FAILED_PRECONDITION",
        "The model differs from the run's, or is cut differently; or the shard insists on another.",
        "Start every worker with the same model and code.",
        "the differences in the message; `run.model`, `sync.fragments`", also="rejected contributions",
    ),
    _call(
        "FROZEN_MISMATCH", "FAILED_PRECONDITION",
        "Frozen parameters, or packed weights of quantised layers, differ from those of this run.",
        'Load the same base in the same dtype, or `join(..., frozen="any")`. If your loop changes them, '
        '`join(..., private=[...])` keeps them local, and `shared="all"` merges them.',
        "the base model of each worker",
    ),
    _call("NOT_JOINED", "FAILED_PRECONDITION", "The learner has no lease here, or the shard has restarted.", JOINS),
    _call(
        "LEASE_EXPIRED", "FAILED_PRECONDITION", "The learner was silent for longer than its lease.",
        JOINS + " If it happens often, raise `lease.lease_s`.", "`lease.lease_s`, the link",
    ),
    _call(
        "STALLED", "FAILED_PRECONDITION",
        "The learner sent heartbeats, but took no inner step for `lease.progress_timeout_s`.",
        "Find what its loop waits for.",
        "[DilocoWorkerStalled](runbook.md#dilocoworkerstalled)",
    ),
    _call("STALE_GENERATION", "FAILED_PRECONDITION", "The call is of the learner's earlier life.", "Nothing."),
    _call(
        "SUPERSEDED", "FAILED_PRECONDITION",
        "Another process has joined with the same learner id. This one ends.",
        "Give each worker its own id, or end the one too many.", "`worker.learner_id`", exit_code=4,
    ),
    _call("DRAINING", "UNAVAILABLE", "The shard is shutting down.", "Nothing: it is tried again."),
    _call(
        "BUSY", "RESOURCE_EXHAUSTED", "Too many pushes, pulls, joins, learners or bytes at once.",
        "Nothing: it is tried again. If it stays so, raise the limit in the message.",
        "[limits](operations.md#limits)",
    ),
    _call(
        "TORN_UPLOAD", "UNAVAILABLE",
        "A push stopped or came too slowly, or a later push took its place.",
        "Nothing: it is tried again. If it stays so, the link is too thin.",
        "`diloco doctor` on the learner's machine",
    ),
    _call(
        "NOT_SEEDED", "FAILED_PRECONDITION", "The fragment has no version yet.", AGAIN, also="rejected contributions",
    ),
    _call(
        "UNKNOWN_FRAGMENT", "NOT_FOUND", "Another shard owns the fragment, or none does.",
        "Give workers the addresses of all shards.", "`worker.shards`, `shard.count`",
        also="rejected contributions",
    ),
    _call(
        "VERSION_GONE", "NOT_FOUND", "The shard no longer holds the version that a pull names.",
        "Nothing: the learner pulls the latest.",
    ),
    _call(
        "UNKNOWN_ENCODING", "INVALID_ARGUMENT", "Not an encoding of this run.",
        "Install it on the caller's side, or change the setting.",
        "`sync.push`, `sync.pull`, installed plugins", also="rejected contributions",
    ),
    _call(
        "REFUSED", "UNKNOWN", "A newer shard refuses with a code that this build does not know.",
        EQUAL, VERSIONS,
    ),
)  # fmt: skip
"""A call ends with one of these."""

REJECTIONS = (
    _rejected(
        "WRONG_EPOCH", "Relative to a version that the shard lost.",
        "Nothing: the learner pulls first.", "[DilocoVersionsLost](runbook.md#dilocoversionslost)",
    ),
    _rejected("WRONG_ROUND", "The round is not open, or did not ask this learner.", "Nothing: the work is carried."),
    _rejected(
        "TOO_STALE", "Relative to a version older than `sync.staleness_max`.",
        "Nothing: the work is carried. If it happens often, raise `sync.sync_every` or `sync.staleness_max`.",
        "[DilocoStalenessHigh](runbook.md#dilocostalenesshigh)",
    ),
    _rejected("BAD_SIZE", "Sizes do not fit the fragment, the encoding or the header.", EQUAL, VERSIONS),
    _rejected(
        "BAD_CHECKSUM", "The bytes changed on the way.",
        "Nothing: it is repeated. If it stays so, the learner's machine or link damages bytes.",
        "memory and network of the learner's machine",
    ),
    _rejected("BAD_ENCODING", "Not a valid payload: a scale of 0, NaN or inf, for example.", EQUAL, VERSIONS),
    _rejected(
        "CONTRIBUTION_CONFLICT", "The same contribution came before with other bytes.",
        "Give each worker its own id. Otherwise please file an issue.", "`worker.learner_id`",
    ),
    _rejected(
        "NOT_FINITE", "NaN, infinite, or so large that squares overflow.",
        "Restart the learner if it has diverged.", "the learner's loss and memory",
        also="ends a learner after five rounds in a row: begin again with a new optimizer",
    ),
    _rejected(
        "NORM_TOO_LARGE",
        "The norm is far above the others' for as many steps. With nobody to compare with, and among strangers: above "
        "`guard.norm_factor` times the usual one.",
        "Restart the learner if it has diverged. Among strangers, if all are refused, raise `guard.norm_factor`.",
        "the learner's loss, learning rate and memory",
    ),
    _rejected(
        "QUARANTINED", "The learner's contributions were outliers again and again; the message says for how long.",
        "Restart it if it has diverged. Otherwise wait.",
        "its loss, data and memory; [DilocoLearnerQuarantined](runbook.md#dilocolearnerquarantined)",
    ),
    _rejected(
        "IMPLAUSIBLE", "More tokens or steps than the learner has reported and can have trained.",
        "Nothing after a long absence: the limit grows with time. Else find out who runs it.",
        "tokens and steps that the loop gives to `learner.step`",
    ),
)  # fmt: skip
"""A push is answered REJECTED with one of these, or with one of the calls' codes that say so."""
