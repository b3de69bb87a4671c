"""One code, explained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Where a code is met. The value is how lists call it."""

    CALL = "refused calls"  # a gRPC call ends with it
    CONTRIBUTION = "rejected contributions"  # a push is answered REJECTED with it
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
    """A code that people meet. Texts are Markdown, with links as from a page in docs/."""

    code: str
    kind: Kind
    means: str
    do: str
    """What to do. Alerts have numbered steps."""
    look: str = ""
    """What to look at first: a setting, a file, a figure; empty where `do` or the message itself says it."""
    status: str = ""
    """gRPC status of a refused call."""
    exit_code: int | None = None
    """Of a command that ends with it."""
    also: str = ""
    """Where else it is met."""
    is_logged: bool = False
    """It stands in the log of a process that goes on."""
