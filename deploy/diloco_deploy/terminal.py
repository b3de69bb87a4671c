"""Shows a cluster: a live view on a terminal, and elsewhere one plain line every few seconds.

`view`, `line` and `tables` are pure: they turn a snapshot and a width into text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_common import units
from diloco_common.wire.calls import SAY_EVERY_S
from diloco_deploy import EVERY_S
from diloco_deploy.cluster.members import SeenMember
from diloco_deploy.cluster.model import Cluster

_RATE = "tok/s"
_RATES = {"tokens": _RATE, "samples": "samples/s"}
_STYLES = {
    "training": "green",
    "ready": "green",
    "died": "red",
    "lost": "red",
    "no answer": "red",
    "away": "red",
    "dead": "red",
    "unknown": "yellow",
    "left_out": "red",
    "stalled": "yellow",
    "partly": "yellow",
    "not ready": "yellow",
}


# ---------------------------------------------------------------- pure


@dataclass(frozen=True)
class Snapshot:
    cluster: Cluster
    elapsed_s: float = 0.0
    now: float = 0.0
    losses: tuple[float, ...] = ()
    """The training loss over time, oldest first."""
    eta_s: float | None = None
    doing: str = "training"


def tables(snapshot: Snapshot, width: int) -> Group:
    """Shards, mirrors and standbys, and workers, in as many columns as fit."""
    shards = snapshot.cluster.shards
    return Group(
        _table(_OF_SHARDS, snapshot, shards, width),
        *([_followers(shards)] if any(shard.followers for shard in shards) else []),
        _table(_OF_WORKERS, snapshot, snapshot.cluster.workers, width),
    )


def legend(snapshot: Snapshot) -> str:
    """Explains a word of the tables that newcomers may misread; empty if it is not shown."""
    if not any(worker.get("contributions", {}).get("carried") for worker in snapshot.cluster.workers):
        return ""
    return "carried: late or refused, so its work went into the worker's next contribution; not lost"


def view(snapshot: Snapshot, width: int) -> Group:
    """The live view: activity, progress, every member, and the loss over time."""
    totals = snapshot.cluster.totals()
    parts: list[RenderableType] = [Text(f"{snapshot.doing}  {units.clock(snapshot.elapsed_s)}", style="bold")]
    merged, budget = units.count(totals.tokens_merged), units.count(totals.tokens_budget)
    if totals.tokens_budget:
        share = min(1.0, totals.tokens_merged / totals.tokens_budget)
        parts += [
            # The empty Padding is needed because a bar alone does not end its line.
            Padding(ProgressBar(total=totals.tokens_budget, completed=totals.tokens_merged, width=min(width, 60)), 0),
            _fit(
                [
                    f"{share:.0%}",
                    f"{units.clock(snapshot.eta_s)} left" if snapshot.eta_s is not None else "",
                    f"{merged} of {budget} {totals.unit}",
                ],
                width,
            ),
        ]
    else:
        parts.append(_fit([f"{merged} {totals.unit}", "no end set"], width))
    parts.append(tables(snapshot, width))
    if totals.loss is not None:
        course = units.sparkline(snapshot.losses, min(40, width - 12))
        parts.append(Text(f"loss {units.loss(totals.loss)} {course}"))
    return Group(*parts)


def line(snapshot: Snapshot, width: int) -> str:
    """The view in one line, without the least important parts if it is too long."""
    totals = snapshot.cluster.totals()
    is_learning = snapshot.doing in ("training", "running")
    up = sum(worker.process == "up" for worker in snapshot.cluster.workers)
    share = f" {totals.tokens_merged / totals.tokens_budget:.0%}" if totals.tokens_budget else ""
    parts = [
        units.clock(snapshot.elapsed_s),
        f"loss {units.loss(totals.loss)}" if totals.loss is not None and is_learning else snapshot.doing,
        f"merged {units.count(totals.tokens_merged)}{share}",
        f"{units.clock(snapshot.eta_s)} left" if snapshot.eta_s is not None else "",
        f"{units.count(totals.tokens_per_s)} {_RATES[totals.unit]}",
        f"workers {up}/{sum(worker.process != 'left' for worker in snapshot.cluster.workers)}",
        f"rounds {totals.rounds}",
        f"pushed {units.size(totals.bytes_pushed)}",
        f"pulled {units.size(totals.bytes_pulled)}",
    ]
    return str(_fit(parts, width))


def _fit(parts: list[str], width: int) -> Text:
    kept = ""
    for part in parts:
        longer = f"{kept}  {part}" if kept else part
        if not part:
            continue
        if kept and len(longer) > width:
            break
        kept = longer
    return Text(kept[:width])


class _TableColumn(NamedTuple):
    title: str
    from_width: int
    """Minimum width of a terminal that shows it."""
    cell: Callable[[Snapshot, SeenMember], str]
    right: bool = True


def _state(snapshot: Snapshot, member: SeenMember) -> str:
    return snapshot.cluster.state_of(member, snapshot.now)


def _versions(_: Snapshot, shard: SeenMember) -> str:
    return f"{shard.versions[0]}-{shard.versions[1]}" if shard.versions else "-"


_OF_SHARDS = (
    _TableColumn("shard", 0, lambda _, shard: shard.name, right=False),
    _TableColumn("state", 48, _state, right=False),
    _TableColumn("version", 0, _versions),
    _TableColumn("open", 64, lambda _, shard: str(shard.open_rounds)),
    _TableColumn("H", 72, lambda _, shard: str(shard.get("sync_every", "-"))),
    _TableColumn("in", 0, lambda _, shard: units.size(shard.count("bytes_pushed"))),
    _TableColumn("out", 0, lambda _, shard: units.size(shard.count("bytes_pulled"))),
    _TableColumn("learners", 56, lambda _, shard: f"{shard.learners_held} alive" if shard.status else "-"),
)
_OF_WORKERS = (
    _TableColumn("worker", 0, lambda _, worker: worker.name, right=False),
    _TableColumn("state", 0, _state, right=False),
    _TableColumn("step", 48, lambda _, worker: str(worker.get("inner_step", "-"))),
    _TableColumn(_RATE, 0, lambda _, worker: units.count(float(worker.get("tokens_per_s", 0.0)))),
    _TableColumn("loss", 0, lambda _, worker: units.loss(worker.get("loss"))),
    _TableColumn("merged", 56, lambda _, worker: str(worker.get("contributions", {}).get("merged", "-"))),
    _TableColumn("carried", 64, lambda _, worker: str(worker.get("contributions", {}).get("carried", "-"))),
)


def _table(columns: Sequence[_TableColumn], snapshot: Snapshot, members: Sequence[SeenMember], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown = [column for column in columns if width >= column.from_width]
    rate = _RATES[snapshot.cluster.totals().unit]
    for column in shown:
        title = rate if column.title == _RATE else column.title
        table.add_column(title, justify="right" if column.right else "left", no_wrap=True)
    for member in members:
        table.add_row(*(_cell(column, column.cell(snapshot, member)) for column in shown))
    return table


def _followers(shards: Sequence[SeenMember]) -> Table:
    table = Table("reader", "state", "of", "site", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for shard in shards:
        for one in shard.followers:
            state = Text(f"{one.state} {units.clock(one.for_s)}", style=_STYLES.get(one.state, "green"))
            table.add_row(f"{one.role} {one.name}", state, shard.name, one.site or "-")
    return table


def _cell(column: _TableColumn, text: str) -> Text:
    if column.title != "state":
        return Text(text)
    word = re.sub(r" [\d:]+$", "", text)  # "away 0:12"
    return Text(text, style=_STYLES.get(word, ""))


# ---------------------------------------------------------------- on the terminal


class Display(Protocol):
    def show(self, snapshot: Snapshot, now: float) -> None:
        """Draw the current state, but no more often than a person can read."""

    def tell(self, text: str) -> None:
        """Print one event."""

    def close(self) -> None:
        """Restore the terminal. Calls after the first do nothing."""


class LineDisplay:
    """Plain lines, for a file, a pipe or a dumb terminal."""

    def __init__(self, console: Console, every_s: float = SAY_EVERY_S) -> None:
        self._console, self._every_s = console, every_s
        self._next = 0.0

    def show(self, snapshot: Snapshot, now: float) -> None:
        if now < self._next:
            return
        self._next = now + self._every_s
        self.tell(line(snapshot, _line_width(self._console)))

    def tell(self, text: str) -> None:
        # No wrapping and no color: one event, one line.
        self._console.file.write(text + "\n")
        self._console.file.flush()

    def close(self) -> None:
        pass


class LiveDisplay:
    """The view, redrawn at the bottom of the terminal. Events scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()
        self._next = 0.0

    def show(self, snapshot: Snapshot, now: float) -> None:
        if now < self._next:
            return
        self._next = now + EVERY_S
        self._live.update(view(snapshot, self._console.width), refresh=True)

    def tell(self, text: str) -> None:
        self._console.print(escape(text), highlight=False)

    def close(self) -> None:
        self._live.stop()


def display_for(console: Console) -> Display:
    """The live view on a terminal, lines elsewhere. NO_COLOR removes only the colors."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return LineDisplay(console)


def _line_width(console: Console) -> int:
    return console.width if console.is_terminal or "COLUMNS" in os.environ else 160
