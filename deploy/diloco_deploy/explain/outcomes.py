"""What is not an error: outcomes of pushes, fates of work, words of readiness; and exit codes."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind

NOTHING = "Nothing."


def _outcome(code: str, means: str, do: str = NOTHING, look: str = "") -> Entry:
    return Entry(code, Kind.OUTCOME, means, do, look)


def _exit(number: int, means: str, do: str) -> Entry:
    return Entry(str(number), Kind.EXIT, means, do, exit_code=number)


OUTCOMES = (
    _outcome("OK", "The call was answered, or the check found nothing."),
    _outcome("ACCEPTED", "The shard merges the contribution when its round closes."),
    _outcome("DUPLICATE", "The same contribution was accepted before. It counts once."),
    _outcome(
        "LATE",
        "The contribution came after its round. No work is lost: it is part of the next contribution.",
        "Nothing if it is rare. Otherwise raise `sync.sync_every` or `sync.patience`, or choose a smaller encoding.",
        "`diloco doctor` on that learner's machine, [WAN](wan.md)",
    ),
    _outcome(
        "REJECTED",
        "A guard refused the contribution, with a code that says why. Its work is in the next one.",
        "`diloco explain` with that code.", "`diloco_shard_contributions_rejected_total`",
    ),
    _outcome("MERGED", "The work is in a version."),
    _outcome("CARRIED", "The work was late or refused, and is in the learner's next contribution."),
    _outcome(
        "FENCED",
        "Accepted, but the learner lost its lease before the merge. It carries the work on.",
        NOTHING, "LEASE_EXPIRED",
    ),
    _outcome("RECOVERING", "`/readyz` of a shard: it reads its data folder, and serves soon."),
    _outcome("EVICTED", "A learner's lease has ended. Rounds do not wait for it; it may join again."),
)  # fmt: skip

EXITS = (
    _exit(0, "ok", NOTHING),
    _exit(1, "unexpected: a bug, a broken promise, or what a check found", "Please file a bug with the traceback."),
    _exit(2, "command line, configuration, or a model that cannot be synchronised", "Correct what the message names."),
    _exit(3, "data, a checkpoint, or the data folder of a shard", "See the code of the message."),
    _exit(4, "in use: another process has the port, the data folder or the learner id", "End it, or choose another."),
    _exit(5, "cannot connect", "`diloco doctor --shards HOST:PORT` names the cause."),
    _exit(6, "refused by a shard", "See the code of the message."),
    _exit(7, "`diloco status --strict`: somebody who is expected is not there", "Do what it says of each."),
    _exit(130, "interrupted", NOTHING),
    _exit(143, "ended by SIGTERM, once what a learner had trained was handed over", NOTHING),
)
