"""Errors, by their classes (`diloco_common.errors`), and codes that are no error of anybody."""

from __future__ import annotations

from diloco_common.errors import CALLS, DilocoError, Refusal, all_kinds
from diloco_deploy.explain.entry import Entry, Kind


def _of(error: type[DilocoError]) -> Entry:
    own = vars(error)  # not what it inherits
    status = error.status if issubclass(error, Refusal) and error.met == CALLS else ""
    return Entry(
        error.code, Kind(error.met), " ".join((error.__doc__ or "").split()), own.get("do", ""), own.get("look", ""),
        status, error.exit_code, own.get("also", ""), error.is_logged,
    )  # fmt: skip


ERRORS = tuple(_of(error) for error in all_kinds() if error is not DilocoError)
WORDS = (
    Entry(
        "SHARD_AWAY",
        Kind.COMMAND,
        (
            "In `diloco status`: a shard does not answer, or most learners do not reach it. They train on. The exit "
            "code is that of `--strict`."
        ),
        "Start it again with its data folder.",
        look="the log of the shard, and the way to it",
        exit_code=7,
    ),
    Entry(
        "SHARD_UNKNOWN",
        Kind.COMMAND,
        "In `diloco status`: a shard was not asked, and no learner speaks of it.",
        "Add its address to `--http`.",
        look="`shard.count`",
        exit_code=7,
    ),
    Entry(
        "WORKER_AWAY",
        Kind.COMMAND,
        "In `diloco status`: a worker is silent, or ended without a goodbye. The others train on.",
        "Start it again, and it goes on.",
        look="the log of the worker",
        exit_code=7,
    ),
    Entry(
        "UNEXPECTED",
        Kind.COMMAND,
        "Something that should not happen.",
        "If the message does not help, please file an issue with the traceback.",
        look="the message",
        exit_code=1,
    ),
    Entry(
        "STORAGE",
        Kind.DATA,
        "The disk refuses a version: nothing is announced until it works. `/readyz` says `storage`.",
        "[DilocoVersionNotDurable](runbook.md#dilocoversionnotdurable)",
        look="the system's own words in the log",
        is_logged=True,
    ),
    Entry(
        "CHECKPOINT",
        Kind.DATA,
        "A regular checkpoint failed: the next version tries again.",
        "[DilocoCheckpointFailing](runbook.md#dilococheckpointfailing)",
        look="the system's own words in the log",
        is_logged=True,
    ),
)
"""In answers of `diloco status`, in logs, and at the end of a command that should not end so."""
