"""`diloco record`: whose work is in each version, with which weight, and how much of it was cut.

Shards remember the last contributions of their epoch (`ledger.RECORD_MAX`) while they run. `--follow --json` can write
all of them to a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import Parameter
from pydantic import BaseModel
from rich.table import Table

from diloco_common.command import QuietConsole
from diloco_common.errors import CannotConnect
from diloco_common.options import Config, Flag, Json, setting
from diloco_deploy import EVERY_S
from diloco_deploy.cluster.asking import Asker, NoAnswer, ask_record
from diloco_deploy.status import whom_to_ask


class Line(BaseModel):
    """One learner's contribution to one version of one fragment, as a line of `--json`."""

    at: float
    """Unix time of the version's announcement, by the caller's clock."""
    shard: str
    epoch: int
    fragment: int
    version: int
    learner: str
    tokens: int
    """Tokens trained for this, as the learner claims."""
    share: float
    """Share of the version's weights, in [0, 1]; 0: it was left out."""
    kept: float
    """Factor that scaled its length, in (0, 1]."""


class AskedShards(NamedTuple):
    addresses: list[str]
    known: dict[str, tuple[int, int]]
    """Address -> epoch and number of the last line."""

    def news(self, asker: Asker, silent: dict[str, str]) -> Iterator[Line]:
        """New lines. `silent`: filled with the reasons of shards that do not answer."""
        for address in self.addresses:
            try:
                yield from self._of(address, asker)
            except NoAnswer as error:
                silent[address] = str(error)

    def _of(self, address: str, asker: Asker) -> Iterator[Line]:
        while True:
            said, now = ask_record(asker, address, *self.known.get(address, (0, 0))), time.time()
            self.known[address] = int(said["epoch"]), int(said["seq"])
            for one in said["lines"]:
                at = round(now - float(one.pop("ago_s")), 3)
                yield Line(at=at, shard=address, epoch=said["epoch"], **one)
            if not said["lines"]:
                return


def record(
    *,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder of the cluster that `diloco up` runs")
    ] = None,
    config: Config = None,
    http: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="ask these shards instead")] = None,
    tls: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="they serve over TLS: folder of an observer's or admin's certificate"),
    ] = None,
    token_file: Annotated[
        str | None, Parameter(metavar="FILE", help="with --http: send this token, so that other machines show all")
    ] = None,
    follow: Annotated[Flag, Parameter(name=("--follow", "-f"), help="follow new contributions until Ctrl-C")] = False,
    json: Json = False,
) -> int:
    """Show whose work is in each version: its share of the weights, and how much of its length was kept.

    Without --json, a table over all versions that shards remember: how often each learner was merged, its mean share,
    and what was cut. With --json, a line for each contribution to each version.
    """
    where, asker = whom_to_ask(folder, config, http, tls, token_file)
    found = where.addresses()
    shards = AskedShards([at for name, at in found.items() if where.http or name.startswith("shard-")], {})
    silent: dict[str, str] = {}
    lines = list(shards.news(asker, silent))
    if len(silent) == len(shards.addresses):
        raise CannotConnect("; ".join(silent.values()))
    console, said = QuietConsole(), set[str]()
    while True:
        for why in set(silent.values()) - said:
            print(f"! {why}: its versions are not here", file=sys.stderr, flush=True)
        said = set(silent.values())
        if follow or json:
            console.file.writelines(f"{dumps(one.model_dump()) if json else _words(one)}\n" for one in lines)
            console.file.flush()
        else:
            console.print(table(lines))
        if not follow:
            return 0
        time.sleep(EVERY_S)
        silent = {}
        lines = list(shards.news(asker, silent))


def table(lines: list[Line]) -> Table:
    shown = Table("learner", "versions", "left out", "tokens", "mean share", "cut", "mean cut", box=None)
    versions = len({(one.shard, one.epoch, one.fragment, one.version) for one in lines})
    for learner in sorted({one.learner for one in lines}):
        mine = [one for one in lines if one.learner == learner]
        merged = [one for one in mine if one.share > 0]
        cut = [1 - one.kept for one in merged if one.kept < 1]
        tokens, share = sum(one.tokens for one in merged), sum(one.share for one in merged) / max(1, len(merged))
        shown.add_row(
            learner, f"{len(merged)} of {versions}", str(len(mine) - len(merged)), f"{tokens:,}", f"{share:.1%}",
            f"{len(cut)} times", f"{sum(cut) / max(1, len(cut)):.1%}",
        )  # fmt: skip
    return shown


def _words(one: Line) -> str:
    what = f"share {one.share:.1%}" if one.share else "left out"
    cut = f", cut to {one.kept:.1%}" if one.kept < 1 else ""
    return f"{one.shard} fragment {one.fragment} version {one.version}: {one.learner} {what}{cut}"
