"""`diloco explain`, and its texts for errors, findings, outcomes and exit codes. alerts.md has the alerts."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.errors import CALLS, ConfigError, DilocoError, Refusal, all_kinds
from diloco_common.options import Json


class Kind(Enum):
    """Where a code appears. The values are headings of lists."""

    CALL = "refused calls"  # the status of a gRPC call
    CONTRIBUTION = "rejected contributions"  # the code of a push answered REJECTED
    CONNECTING = "connecting"  # no call gets through
    COMMAND = "commands and training loops"
    DATA = "data folders of shards"
    CHECKPOINT = "checkpoints"
    FINDING = "findings of diloco doctor"
    OUTCOME = "outcomes"  # expected: nothing is wrong
    ALERT = "alerts of Prometheus"
    EXIT = "exit codes"


@dataclass(frozen=True)
class Entry:
    """A code and its explanation. Texts are Markdown, with links relative to docs/."""

    code: str
    kind: Kind
    means: str
    do: str
    """What to do. Alerts have numbered steps."""
    look: str = ""
    """What to look at first: a setting, a file, a figure; empty if `do` or the message says it."""
    status: str = ""
    """gRPC status of a refused call."""
    exit_code: int | None = None
    """Exit code of a command that ends with it."""
    also: str = ""
    is_logged: bool = False
    """Whether it appears in the log of a process that continues."""


def _of(error: type[DilocoError]) -> Entry:
    own = vars(error)  # without inherited attributes
    status = error.status if issubclass(error, Refusal) and error.met == CALLS else ""
    return Entry(
        error.code, Kind(error.met), " ".join((error.__doc__ or "").split()), own.get("do", ""), own.get("look", ""),
        status, error.exit_code, own.get("also", ""), error.is_logged,
    )  # fmt: skip


ERRORS = tuple(_of(error) for error in all_kinds() if error is not DilocoError)
WORDS = (
    Entry(
        "SHARD_AWAY", Kind.COMMAND,
        "In `diloco status`: a shard does not answer, or most learners do not reach it. They keep training.",
        "Restart it with its data folder.", "the log of the shard, and the way to it", exit_code=7,
    ),
    Entry(
        "SHARD_UNKNOWN", Kind.COMMAND, "In `diloco status`: a shard was not asked, and no learner mentions it.",
        "Add its address to `--http`.", "`shard.count`", exit_code=7,
    ),
    Entry(
        "WORKER_AWAY", Kind.COMMAND,
        "In `diloco status`: a worker is silent, or ended without a goodbye. The others keep training.",
        "Restart it.", "the log of the worker", exit_code=7,
    ),
    Entry(
        "STALLED", Kind.COMMAND, "In `diloco status`: a learner sends heartbeats, but ends no inner step.",
        "Find out what its loop waits for.", "[DilocoWorkerStalled](runbook.md#dilocoworkerstalled)", exit_code=7,
    ),
    Entry(
        "NO_PROGRESS", Kind.COMMAND,
        "In `diloco status`: a round has been open ten times as long as usual, or there are too few learners for one.",
        "Fix what the message says about missing learners, or lower `sync.quorum`.",
        "[DilocoRoundOverdue](runbook.md#dilocoroundoverdue)", exit_code=7,
    ),
    Entry(
        "CUT_OFF", Kind.COMMAND,
        "In `diloco status`: a learner has a lease at some shards only. Its work on the other fragments waits.",
        "Run `diloco doctor` on its machine.", "the log of the learner", exit_code=7,
    ),
    Entry(
        "LEFT_OUT", Kind.COMMAND,
        "In `diloco status`: the contributions of a learner point away from the others, or are always the same. They "
        "are not merged.",
        "Compare its data, labels and learning rate with those of the others.",
        "[DilocoLearnerLeftOut](runbook.md#dilocolearnerleftout)", exit_code=7,
    ),
    Entry(
        "SHORTENED", Kind.COMMAND,
        "In `diloco status`: the contributions of a learner are far longer than those of others, and are cut.",
        "Lower its learning rate, or compare its batches with theirs.", "`kept` in the shards' `/status`", exit_code=7,
    ),
    Entry(
        "NO_TOKENS", Kind.COMMAND, "Every step of a learner reported `tokens=0`, so its work is never merged.",
        "Count the tokens of the batch: `batch.numel()`, or where a mask is true.", "`learner.step(tokens=...)`",
        is_logged=True,
    ),
    Entry(
        "PUSHES_FAIL", Kind.CONNECTING,
        "The shard answers small messages, but pushes fail, so the learner's work is not merged.",
        "Raise the proxy's limit (`client_max_body_size` of nginx), or lower the MTU.",
        "the status in the message; proxies between the learner and the shard", is_logged=True,
    ),
    Entry(
        "NOT_MERGED", Kind.COMMAND, "A learner has finished, and some of its work is in no version.",
        "Fix what the message says. `learner.finish(regardless=True)` loads the global values into the model.",
        is_logged=True,
    ),
    Entry(
        "UNEXPECTED", Kind.COMMAND, "This should not happen.",
        "File an issue with the traceback.", "the message", exit_code=1,
    ),
    Entry(
        "VERSIONS_LOST", Kind.DATA,
        "A shard came back with older versions than a learner has seen, or with none. If it has none, the "
        "learner with the newest version brings its values.",
        "Set `shard.data_dir`. Training continues.", "the disk of the shard; `versions lost` in its log",
        is_logged=True,
    ),
    Entry(
        "STORAGE", Kind.DATA,
        "The disk refuses a version. The shard announces nothing until the disk works.",
        "[DilocoVersionNotDurable](runbook.md#dilocoversionnotdurable)", "the system's own words in the log",
        is_logged=True,
    ),
    Entry(
        "CHECKPOINT", Kind.DATA, "A regular checkpoint failed. The next version tries again.",
        "[DilocoCheckpointFailing](runbook.md#dilococheckpointfailing)", "the system's own words in the log",
        is_logged=True,
    ),
)  # fmt: skip
"""Codes in `diloco status`, in logs, and of unexpected failures."""


def _finding(code: str, means: str, do: str, look: str = "") -> Entry:
    return Entry(code, Kind.FINDING, means, do, look)


LINK = (
    _finding(
        "NAME_UNKNOWN", "A shard's host name has no address on this machine.",
        "Correct the name, or add it to DNS or /etc/hosts.", "`getent hosts NAME` here and elsewhere",
    ),
    _finding(
        "PORT_CLOSED", "The machine answers, but nothing listens on that port.",
        "Correct the port, or start the shard. Its log names the port (`serving`).", "`shard.listen`",
    ),
    _finding(
        "PORT_SILENT", "Nobody answers: a firewall, or a wrong address.",
        "Allow TCP from learners to that port.",
        "firewalls on and between both machines; [ports](wan.md#ports-and-direction)",
    ),
    _finding(
        "NO_ANSWER", "The port connects, but the process is stopped, or its machine is overloaded.",
        "Restart the process if it hangs.",
        "`diloco health --grpc HOST:PORT` on the shard's machine",
    ),
    _finding(
        "CERTIFICATE_ENDS_SOON", "This machine's certificate, or the shard's, expires within 14 days.",
        "Renew it (`diloco certs issue`): no restart is needed.", "`diloco certs list`",
    ),
    _finding(
        "CLOCK_SKEWED",
        "The clocks differ, so certificates begin and end at the wrong time.",
        "Set both clocks by NTP (`timedatectl set-ntp true`).", "`date -u` on both machines",
    ),
    _finding("CLOCK_UNKNOWN", "The shard does not report the time.", "Install equal versions."),
    _finding(
        "PACKAGES_DIFFER", "The packages differ, but the protocol is the same.",
        "Install equal versions when you can.", "`diloco --version` on both machines",
    ),
    _finding(
        "SHARDS_MISSING", "The run has more shards than were named.",
        "Name every shard: a learner needs all of them.", "`worker.shards`",
    ),
    _finding(
        "LINK_FAR", "A round trip takes longer than half a second.",
        "Set `lease.lease_s` to at least ten round trips, and raise H.",
        "the route to the shards: a VPN, a satellite, a full line",
    ),
)  # fmt: skip

MACHINE = (
    _finding(
        "DISK_SLOW", "The disk is slow to make a version durable, and rounds wait.",
        "Use a local disk, more shards with a disk each, or a larger H.",
        "`shard.data_dir`; [keeping versions](performance.md#keeping-versions)",
    ),
    _finding(
        "DISK_SMALL", "The shard's versions do not fit on the disk.",
        "Free some space, or use a larger volume.", "`df -h` of `shard.data_dir`",
    ),
    _finding(
        "DISK_UNUSABLE", "The data folder cannot be made or written to.",
        "Create it, owned by the user who runs the shard.", "the system's own words in the finding",
    ),
    _finding(
        "NOT_DURABLE", "No data folder is set, so a restarted shard has no versions.",
        "Set `shard.data_dir`, except for a test.", "`shard.data_dir`",
    ),
    _finding(
        "FILES_FEW", "The shard may not open enough files for its learners.",
        "Raise the hard limit: `ulimit -Hn`, `LimitNOFILE=` of systemd, `--ulimit nofile=` of Docker.",
        "`shard.max_learners`, 4 connections for each",
    ),
    _finding(
        "MEMORY_SHORT", "The machine, or its cgroup, has too little memory for the shard.",
        "Use a larger machine or limit, or more shards.", "[memory of a shard](performance.md#memory-of-a-shard)",
    ),
    _finding(
        "KERNELS_MISSING", "There are no native kernels: merging and encoding take several times as long.",
        "Install the wheel for this machine; or install a C compiler (Debian: `gcc libc6-dev`), then "
        "`pip install --force-reinstall --no-deps .`.",
        "`python -m diloco_common.codec`",
    ),
    _finding(
        "DEVICE_MISSING", "torch cannot use the device that was named.",
        "Check that this build of torch supports it, and that the driver sees it (`nvidia-smi`).",
    ),
    _finding(
        "DEVICE_WRONG", "The device computed different bits from the same numbers: it must not train.",
        "Take it out of the run, reset it, and run the doctor again. If this persists, replace it.",
    ),
)  # fmt: skip

OF_DOCTOR = (
    _finding(
        "CHECK_TIMED_OUT", "A check timed out. The others continue.",
        "Run the doctor again.", "the check's name",
    ),
    _finding("CHECK_FAILED", "A check failed because of a bug in the doctor.", "File an issue."),
    _finding("SKIPPED", "The check needs one that failed.", "Fix that one first."),
)  # fmt: skip

FINDINGS = (*LINK, *MACHINE, *OF_DOCTOR)


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
        "The contribution came after its round. No work is lost: it is in the next one.",
        "Nothing if it is rare. Otherwise raise `sync.sync_every`, or use a smaller encoding.",
        "that learner's link, [WAN](wan.md)",
    ),
    _outcome(
        "REJECTED",
        "A guard refused the contribution, with a code. Its work is in the next one.",
        "Run `diloco explain` with that code.", "`diloco_shard_contributions_rejected_total`",
    ),
    _outcome("MERGED", "The work is in a version."),
    _outcome("CARRIED", "The work was late or refused, and is in the next contribution."),
    _outcome(
        "FENCED",
        "Accepted, but the lease ended before the merge. The learner carries the work.",
        NOTHING, "LEASE_EXPIRED",
    ),
    _outcome(
        "READER_AWAY", "`diloco status`: a [mirror or standby](mirrors.md) no longer follows its shard."
    ),
    _outcome("RECOVERING", "`/readyz`: a shard is reading its data folder, and will serve soon."),
    _outcome("EVICTED", "A learner's lease has ended. Rounds do not wait for it."),
)  # fmt: skip

EXITS = (
    _exit(0, "ok", NOTHING),
    _exit(1, "unexpected: a bug, a broken promise, or a finding", "File an issue with the traceback."),
    _exit(2, "command line, configuration, or a model that cannot be synchronized", "Correct what the message names."),
    _exit(3, "data, a checkpoint, or the data folder of a shard", "See the code of the message."),
    _exit(4, "in use: another process has the port, the data folder or the learner id", "End it, or choose another."),
    _exit(5, "cannot connect", "`diloco doctor --shards HOST:PORT` names the cause."),
    _exit(6, "refused by a shard", "See the code of the message."),
    _exit(7, "`diloco status --strict`: something is wrong", "Follow what it says."),
    _exit(130, "interrupted", NOTHING),
    _exit(143, "ended by SIGTERM, after the learner handed over its work", NOTHING),
)


def _alerts(page: str) -> Iterator[Entry]:
    """Each alert is a heading, a paragraph with its meaning, and what to do."""
    for part in page.removeprefix("## ").split("\n## "):
        code, means, do = part.rstrip("\n").split("\n\n", 2)
        yield Entry(code, Kind.ALERT, means, do)


ALERTS = tuple(_alerts((Path(__file__).parent / "alerts.md").read_text(encoding="utf-8")))
"""Alerts of Prometheus. Lines are wrapped as in docs/runbook.md."""


ENTRIES: tuple[Entry, ...] = (*ERRORS, *WORDS, *FINDINGS, *OUTCOMES, *ALERTS, *EXITS)
CODES = {entry.code: entry for entry in ENTRIES}


def explain(
    code: Annotated[
        str, Parameter(metavar="CODE", help="such as TLS_MISMATCH, in any spelling", show_default=False)
    ] = "",
    /,
    *,
    json: Json = False,
) -> int:
    """Say what an error, alert, finding or outcome means, what to look at and what to do. Without a code: list all."""
    entries = [find(code)] if code else list(CODES.values())
    if json:
        found = [{**vars(entry), "kind": entry.kind.value} for entry in entries]
        print(dumps(found[0] if code else found, indent=2))
    else:
        print("\n".join(_one(entries[0]) if code else _all()))
    return 0


def of_kind(*kinds: Kind) -> list[Entry]:
    """Entries in the order of the pages."""
    return [entry for entry in ENTRIES if entry.kind in kinds]


def find(code: str) -> Entry:
    """The entry of a code, in any spelling: late, [TLS_MISMATCH]. Raises ConfigError with suggestions."""
    wanted = _plain(code)
    by_plain = {_plain(known): entry for known, entry in CODES.items()}
    if (entry := by_plain.get(wanted)) is not None:
        return entry
    near = difflib.get_close_matches(wanted, by_plain, n=3, cutoff=0.7)
    holding = [known for known in by_plain if len(wanted) > 2 and wanted in known]
    meant = [by_plain[known].code for known in dict.fromkeys((*near, *holding))][:6]
    hint = f"; did you mean {', '.join(meant)}?" if meant else ""
    raise ConfigError(f"no code is called {code[:60]!a}{hint} (`diloco explain` lists all)")


def _plain(code: str) -> str:
    return "".join(c for c in code.lower() if c.isalnum())


WIDTH = 100


def _one(entry: Entry) -> Iterator[str]:
    where = [entry.kind.value]
    where += [f"gRPC status {entry.status}"] * bool(entry.status)
    where += [f"exit code {entry.exit_code}"] * (entry.exit_code is not None and entry.kind is not Kind.EXIT)
    where += ["logged"] * entry.is_logged
    yield f"{entry.code} ({', '.join(where)})"
    yield from _said("Means", entry.means)
    yield from _said("Also", entry.also)
    yield from _said("Look at", entry.look)
    yield from _said("Do", entry.do)


def _said(title: str, text: str) -> Iterator[str]:
    if not text:
        return
    yield ""
    yield f"{title}:"
    for block in re.split(r"\n\n|\n(?=\d+\. |- )", plain_text(text)):
        indent = "   " if re.match(r"\d+\. |- ", block) else ""
        yield from textwrap.wrap(
            " ".join(block.split()), WIDTH, initial_indent="  ", subsequent_indent="  " + indent,
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip


def _all() -> Iterator[str]:
    for kind in Kind:
        yield f"{kind.value}:"
        codes = ", ".join(entry.code for entry in of_kind(kind))
        yield from textwrap.wrap(codes, WIDTH, initial_indent="  ", subsequent_indent="  ")
        yield ""
    yield "diloco explain CODE says what one means, what to look at and what to do."


def plain_text(markdown: str) -> str:
    """Markdown for a terminal: links become words with their page, tables become lists."""
    text = re.sub(r"\[([^\]]+)\]\(#[\w-]+\)", r"\1", markdown)
    text = re.sub(r"\[([^\]]+)\]\(runbook\.md#\w+\)", r"\1 (diloco explain \1)", text)
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r"\1 (docs/\2)", text)
    text = re.sub(r"^\|[ |-]+\|$\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"^\| (.*) \|$", lambda row: "- " + row[1].replace(" | ", ": "), text, flags=re.MULTILINE)
