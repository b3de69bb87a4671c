"""How commands and training loops fail: connecting, configuration, data."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind


def _connecting(code: str, means: str, do: str, look: str = "", exit_code: int = 5) -> Entry:
    return Entry(code, Kind.CONNECTING, means, do, look, exit_code=exit_code)


def _command(code: str, exit_code: int, means: str, do: str, look: str = "") -> Entry:
    return Entry(code, Kind.COMMAND, means, do, look, exit_code=exit_code)


def _data(code: str, exit_code: int | None, means: str, do: str, look: str = "", *, logged: bool = False) -> Entry:
    return Entry(code, Kind.DATA, means, do, look, exit_code=exit_code, logged=logged)


def _checkpoint(code: str, exit_code: int, means: str, do: str, look: str = "") -> Entry:
    return Entry(code, Kind.CHECKPOINT, means, do, look, exit_code=exit_code)


TROUBLES = (
    _connecting(
        "CANNOT_CONNECT", "No shard answers at the address.", "Start the shards, or correct the address.",
        "`diloco doctor --shards HOST:PORT` on the caller's machine",
    ),
    _connecting(
        "TLS_NEEDED", "The port speaks TLS, and this caller plaintext.",
        "Set `security.tls` (`tls=` of join) to the caller's folder of `diloco certs issue`.",
        "`security.tls` on both sides",
    ),
    _connecting(
        "NOT_A_SHARD", "What listens on the port does not speak our protocol.",
        "Give the port of gRPC (`shard.listen`, usually 50051), not of HTTP (`shard.http`).",
        "`serving` in the shard's log",
    ),
    _connecting(
        "TLS_NOT_SPOKEN", "The port speaks plaintext, and this caller TLS.",
        "Give the shard a certificate, or leave `security.tls` (`tls=` of join) out at the caller.",
        "`security.tls` on both sides",
    ),
    _connecting(
        "NO_CERTIFICATE", "The shard asks for a certificate, and the folder holds none.",
        "Copy the whole folder that `diloco certs issue` made.", "`cert.pem` and `key.pem` beside `ca.pem`",
    ),
    _connecting(
        "FOREIGN_CERTIFICATE", "One side's certificate is not of the other side's CA.",
        "Give both sides folders that one authority issued.", "`ca.pem` on both sides: they must be equal",
    ),
    _connecting(
        "WRONG_HOST", "The shard's certificate is not for the name that was dialed.",
        "Dial a name that it has, or issue it again with `--host`.", "the names in the message",
    ),
    _connecting(
        "CERTIFICATE_EXPIRED", "A certificate is too old, or this machine's clock is wrong.",
        "Issue another: no restart is needed. Or set the clock.", "`date -u` on both machines",
    ),
    _connecting(
        "CERTIFICATE_NOT_YET_VALID", "A certificate begins later, so a clock is wrong.", "Set the clock.",
        "`date -u` on both machines",
    ),
    _connecting(
        "HANDSHAKE_FAILED", "TLS failed; the message has a cause.",
        "Do what the message says.", "`diloco doctor --shards HOST:PORT --tls FOLDER`",
    ),
    _connecting(
        "UNAVAILABLE", "A call broke or took too long.", "Nothing: it is tried again.",
        "the link, if it happens often", exit_code=1,
    ),
    _command(
        "BAD_CONFIG", 2, "The command line, a file or the environment is wrong.",
        "Correct what the message names.", "the message",
    ),
    _command(
        "SECRET_EXPOSED", 2,
        "A file with a secret belongs to somebody else, or others can read or write it.",
        "Run the command in the message. The owner must be the process's user, or root, and the mode 0600. Root's file "
        "may be readable for a group of that user.",
        "[files](security.md#files)",
    ),
    _command(
        "WRONG_CALL", 2, "A script calls `join`, `step` or another function wrongly.",
        "Call it as the message says.", "[Python](api.md)",
    ),
    _command(
        "UNSUPPORTED_MODEL", 2, "The model cannot be synchronised in its present form.",
        "Do what the message says.", "[own loop](bring-your-loop.md), [islands](islands.md)",
    ),
    _command(
        "MODEL_CHANGED", 2,
        "Parameters were replaced, added, removed, frozen, unfrozen or overwritten after `join`.",
        "Load and convert the model before `join`. Later: `learner.values(...)`, `learner.restore(...)`. Name what is "
        "frozen and unfrozen: `shared=`.",
        "[own loop](bring-your-loop.md#layers-that-are-frozen-and-unfrozen)",
    ),
    _command(
        "VERSION_UNDONE", 2,
        "The optimizer writes its own copy of the weights over the parameters, and so over every version.",
        "Say where the copies are: `join(masters=...)`.",
        "[own loop](bring-your-loop.md#optimizers-with-weights-of-their-own)",
    ),
    _command(
        "LEARNER_ENDED", 2, "The learner has left the run.",
        "Join again with its `state_dict()`.",
    ),
    _command(
        "CHILD_OF_LEARNER", 2,
        "A child of a learner called it, or would join in its place.",
        'Call the learner in its own process, and put what the script runs under `if __name__ == "__main__":`.',
        "[children](bring-your-loop.md#children-of-a-learner)",
    ),
    _command(
        "FORK_UNSAFE", 2,
        "gRPC was imported before diloco_worker, or its fork support is on: forked children would crash.",
        "Import `diloco_worker` first, or set `GRPC_ENABLE_FORK_SUPPORT=0` before the start.",
        "[children](bring-your-loop.md#children-of-a-learner)",
    ),
    _command(
        "BAD_DATA", 3, "Training data or a file of weights is missing or damaged.", "Give the right path.",
        "the path in the message",
    ),
    _command(
        "IN_USE", 4, "A port, a folder or a learner id belongs to another process.",
        "End that process, or choose another.", "the message",
    ),
    _command(
        "ISLAND_BROKEN", 1,
        "A rank of an [island](islands.md) has ended, or the ranks do not call `step` and `poll` alike.",
        "Start all ranks again: `torchrun --max-restarts` does so.", "the log of the rank that ended first",
    ),
    _command(
        "CHAOS_NOT_READY", 1,
        "In `diloco chaos`: a worker did not train within two minutes, or a process ended.",
        "Correct what its log says.", "the log that the message names",
    ),
    _command(
        "SHARD_AWAY", 7,
        "In `diloco status`: a shard does not answer, or most learners do not reach it. They train on. The exit code "
        "is that of `--strict`.",
        "Start it again with its data folder.", "the log of the shard, and the way to it",
    ),
    _command(
        "SHARD_UNKNOWN", 7, "In `diloco status`: a shard was not asked, and no learner speaks of it.",
        "Add its address to `--http`.", "`shard.count`",
    ),
    _command(
        "WORKER_AWAY", 7,
        "In `diloco status`: a worker is silent, or ended without a goodbye. The others train on.",
        "Start it again, and it goes on.", "the log of the worker",
    ),
    _command(
        "UNEXPECTED", 1, "Something that should not happen.",
        "If the message does not help, please file an issue with the traceback.", "the message",
    ),
    _data(
        "WRONG_FOLDER", 3, "The folder belongs to another run, shard or model.",
        "Give the shard its own folder.", "`shard.data_dir`, `shard.index`, `run.id`",
    ),
    _data(
        "NOTHING_INTACT", 3, "A fragment has files, but all are damaged.",
        "Restore a checkpoint, or remove the files: learners seed the fragment again.",
        "the disk; [version file](version-file.md)",
    ),
    _data(
        "VERSION_DAMAGED", 3,
        "A file was damaged. The version before is used. In a checkpoint nothing is restored.",
        "Check the disk. Take another checkpoint.", "the disk's own log (`dmesg`)", logged=True,
    ),
    _data(
        "STORAGE", None,
        "The disk refuses a version: nothing is announced until it works. `/readyz` says `storage`.",
        "[DilocoVersionNotDurable](runbook.md#dilocoversionnotdurable)", "the system's own words in the log",
        logged=True,
    ),
    _data(
        "CHECKPOINT", None, "A regular checkpoint failed: the next version tries again.",
        "[DilocoCheckpointFailing](runbook.md#dilococheckpointfailing)", "the system's own words in the log",
        logged=True,
    ),
    _checkpoint(
        "NO_CHECKPOINT", 3, "No such folder, or no manifest.", "Name another one.",
        "`diloco checkpoint list`",
    ),
    _checkpoint(
        "CHECKPOINT_DAMAGED", 3, "The manifest or a file is damaged.", "Take another checkpoint.",
        "`diloco checkpoint verify`",
    ),
    _checkpoint(
        "CHECKPOINT_INCOMPLETE", 3, "Fragments are missing.", "Name the parts, or the data folders, of all shards.",
    ),
    _checkpoint(
        "CHECKPOINT_EXISTS", 3,
        "The name is taken. A checkpoint is never changed.", "Give another name.",
    ),
    _checkpoint(
        "CHECKPOINTS_DIFFER", 3, "The parts are of different runs, models or times.",
        "Name the parts of one checkpoint.",
    ),
    _checkpoint(
        "MISSING_EXTRA", 2, "URLs need a library that is not installed.",
        "`pip install 'decoupled-diloco[object-store]'`",
    ),
    _checkpoint(
        "OBJECT_STORE", 5, "The object store refuses or does not answer.", "Correct URL, credentials or endpoint.",
        "the store's own words in the message",
    ),
)  # fmt: skip
