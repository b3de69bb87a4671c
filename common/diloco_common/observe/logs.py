"""One event per line with its identifiers, on top of the standard library's logging.

    log = Log("shard-0")
    log.event("round closed", fragment=3, version=7, participants=2)

writes `2026-11-29 12:01:05 shard-0 round closed fragment=3 version=7 participants=2` (UTC). Text from outside is
escaped: no control character, newline or terminal sequence is ever written raw. Only entry points call `configure`. A
library calls `listen`, which leaves existing handlers alone. Lines of one kind that are too frequent are counted
instead (`Repeats`).
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO, TypeAlias

from diloco_common.errors import WORDS_MAX
from diloco_common.wire.calls import SAY_EVERY_S

EVENTS_MAX = 1000
"""Maximum number of lines of one kind in a window; fewer for warnings and errors."""
WARNINGS_MAX = 20
KINDS_MAX = 256
"""Maximum number of kinds counted at once. The rest count as one kind."""

Kind: TypeAlias = tuple[str, int, str, str]
"""Logger, level, text, stable code."""


@dataclass(frozen=True, slots=True)
class Over:
    """The end of a window in which lines were only counted."""

    kind: Kind
    count: int
    seconds: float


@dataclass(slots=True)
class _Window:
    began: float
    said: int = 0
    counted: int = 0


class Repeats:
    """Decides which lines are written."""

    def __init__(self) -> None:
        self._windows: dict[Kind, _Window] = {}  # by start time

    def heard(self, kind: Kind, now: float) -> tuple[bool, Sequence[Over]]:
        """Whether to write a line of this kind, and the ended windows to report first."""
        over = self._ended(now)
        if kind not in self._windows and len(self._windows) >= KINDS_MAX:
            kind = (kind[0], logging.WARNING, "lines of other kinds", "")
        window = self._windows.setdefault(kind, _Window(now))
        if window.said < (WARNINGS_MAX if kind[1] >= logging.WARNING else EVENTS_MAX):
            window.said += 1
            return True, over
        window.counted += 1
        return False, over

    def all(self) -> Sequence[Over]:
        """The windows that are left to report at the end."""
        windows, self._windows = self._windows, {}
        return [Over(kind, window.counted, SAY_EVERY_S) for kind, window in windows.items() if window.counted]

    def _ended(self, now: float) -> Sequence[Over]:
        over = []
        for kind, window in list(self._windows.items()):
            if 0 <= now - window.began < SAY_EVERY_S:  # False if the wall clock was set back
                break
            del self._windows[kind]
            if window.counted:
                over.append(Over(kind, window.counted, now - window.began))
        return over


_HUNG_UP = "ExecuteBatchError"
"""grpc.aio logs it, with a traceback, when a caller hangs up during an answer."""


class Log:
    """The log of one process, or of a part of it. `name` is its name, for example "shard-0"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._logger = logging.getLogger(f"diloco.{name}")

    def event(self, what: str, **fields: object) -> None:
        """Something changed."""
        self._write(logging.INFO, what, fields)

    def debug(self, what: str, **fields: object) -> None:
        """A detail for debugging."""
        self._write(logging.DEBUG, what, fields)

    def warning(self, what: str, **fields: object) -> None:
        """The process continues, but not as intended."""
        self._write(logging.WARNING, what, fields)

    def error(self, what: str, *, trace: BaseException | None = None, **fields: object) -> None:
        """Something failed for good. `trace` adds the traceback of an unexpected error."""
        self._write(logging.ERROR, what, fields, trace)

    def _write(self, level: int, what: str, fields: dict[str, object], trace: BaseException | None = None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        text = " ".join([escape(what), *(f"{key}={show(value)}" for key, value in fields.items())])
        extra = {"diloco_process": self.name, "diloco_event": what, "diloco_fields": fields}
        # The message has no arguments, so logging does no %-formatting.
        self._logger.log(level, text, exc_info=trace, extra=extra)


def configure(*, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send our events, and the warnings of other libraries, to stderr. Replaces any earlier handlers."""
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(Handler(sys.stderr if stream is None else stream))
    root.setLevel(logging.WARNING)
    logging.getLogger("diloco").setLevel(level)
    logging.captureWarnings(True)


def listen() -> None:
    """For a library: send our events to stderr, unless the process has handlers for them. May be repeated."""
    ours = logging.getLogger("diloco")
    if all(isinstance(h, logging.NullHandler) for h in (*ours.handlers, *logging.getLogger().handlers)):
        ours.addHandler(Handler(sys.stderr))
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


def keep_quiet() -> None:
    """For a library: if the process has no handlers, log nothing of ours, not even warnings."""
    ours = logging.getLogger("diloco")
    if not ours.handlers:
        ours.addHandler(logging.NullHandler())


class Handler(logging.StreamHandler[TextIO]):
    """Writes the first lines of a kind, and then how many more there were."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(TextFormatter())
        self._repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and type(record.exc_info[1]).__name__ == _HUNG_UP:
            return
        what, code = _kind(record)
        says, over = self._repeats.heard((record.name, record.levelno, what, code), record.created)
        self._tell(over)
        if says:
            super().emit(record)

    def close(self) -> None:
        """Report what was only counted. Also called at the end of the process."""
        self._tell(self._repeats.all())
        super().close()

    def _tell(self, over: Iterable[Over]) -> None:
        for one in over:
            name, level, what, code = one.kind
            text = f"said {one.count:,} times more in {one.seconds:.0f} s: {what}"
            record = logging.LogRecord(name, level, "", 0, f"{text} code={code}" if code else text, None, None)
            record.diloco_process = name.removeprefix("diloco.")
            record.diloco_event = text
            record.diloco_fields = {"code": code} if code else {}
            super().emit(record)


def _kind(record: logging.LogRecord) -> tuple[str, str]:
    """The kind of a line: the event and its stable code; for other libraries, the message."""
    event = getattr(record, "diloco_event", None)
    if event is None:
        return escape(str(record.msg)), ""
    fields: dict[str, object] = record.__dict__.get("diloco_fields", {})
    return escape(event), escape(str(fields.get("code", "")))


class TextFormatter(logging.Formatter):
    """`YYYY-MM-DD HH:MM:SS process [LEVEL] event key=value ...`, without the level if it is INFO."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.created))
        process = getattr(record, "diloco_process", record.name)
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        lines = [f"{stamp} {process} {level}{_message(record)}"]
        lines += [f"    {line}" for line in _traceback_lines(record)]
        return "\n".join(lines)


def show(value: object) -> str:
    """A value as shown in `key=value`: one word or quoted, escaped, and cut if long."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return ",".join(show(item) for item in items) or "-"
    text = str(value)
    shown = escape(text)
    if not text or any(c in text for c in ' "=,'):
        return '"' + shown.replace('"', '\\"') + '"'
    return shown


def escape(text: str, limit: int = 200) -> str:
    """Text as one line that is safe for a terminal, cut after `limit` characters."""
    cut = "" if len(text) <= limit else f"...(+{len(text) - limit})"
    return "".join(_escape_character(c) for c in text[:limit]) + cut


def _escape_character(c: str) -> str:
    if c == "\\":
        return "\\\\"
    # Not printable: control characters, ESC, line separators, direction overrides, lone surrogates.
    return c if c.isprintable() else ascii(c)[1:-1]


def _message(record: logging.LogRecord) -> str:
    if hasattr(record, "diloco_event"):
        return record.getMessage()  # already escaped by Log
    return escape(record.getMessage(), WORDS_MAX)


def _traceback_lines(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    text = "".join(traceback.format_exception(record.exc_info[1]))
    return [escape(line, WORDS_MAX) for line in text.splitlines()]
