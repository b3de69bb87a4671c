"""The tables and the picture of docs/comparison.md, from the results of versus.py. The words around them stay.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from versus_machines import LINKS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PICTURE = DOCS / "comparison.md", DOCS / "comparison.png"
NAMES = {
    "ours": "ours",
    "ddp": "torch DDP",
    "torchft": "torchft",
    "hivemind": "hivemind",
    "alone": "no system",
    "mean": "ours, sync.merge=mean",
}
PEERS = ("ddp", "torchft", "hivemind")
CASES = {"plain": "all alike", "slow": "one worker 3 x slower", "killed": "one worker killed, then back"}
COLOURS = {
    "ours": "#c8372d",
    "ddp": "#777777",
    "torchft": "#1f6fb4",
    "hivemind": "#2c9150",
    "alone": "#c9c2b0",
    "mean": "#e09a3a",
}
STALL_MAX_S = 0.05
END_S = 5.0
LOSS_TOP = 3.7
"""The picture begins here: everybody comes down to it within 5 s."""
Result = dict[str, Any]


def line(r: Result) -> str:
    """One result for a person."""
    name = f"{r['system']:<9} {r['link']:<8} {r['case']:<7}"
    if "failed" in r:
        return f"{name} failed: {r['failed']}"
    return (
        f"{name} {r['trained_per_s']:6.0f} trained/s {r['merged_per_s']:6.0f} merged/s  stall {_stalls(r)} ms  "
        f"{r['bytes_per_token']} B/token  loss {loss_at_end(r):.3f}  load {r['load']}  {len(r['deaths'])} deaths"
        f"  machine stood still {1000 * r.get('stood_still_s', 0):.0f} ms"
    )


def loss_at_end(r: Result) -> float:
    """Held-out loss `END_S` before the end, when all systems have copied their models for the last time."""
    return loss_at(r, r["times"]["warm"] + r["seconds"] - END_S)


def loss_at(r: Result, seconds: float) -> float:
    """The last held-out loss until then."""
    return next((float(loss) for at, loss in reversed(r["losses"]) if at <= seconds), float("nan"))


def write(results: Sequence[Result], longer: Sequence[Result]) -> None:
    """Put tables of what is there into the page, and draw the picture anew."""
    page = PAGE.read_text()
    for name, table in (tables(results) | {"longer": _longer(longer)}).items():
        found = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = found.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", page)
    PAGE.write_text(page)
    draw(results, PICTURE)


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Name -> table."""
    by_case = {case: _case([r for r in results if r["case"] == case]) for case in CASES}
    notes = {"deaths": _deaths(results)}
    return by_case | {"goals": _goals(results)} | notes


def draw(results: Sequence[Result], picture: Path) -> None:
    """Held-out loss over wall-clock: a row for each case, a column for each link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(CASES), len(LINKS), figsize=(11, 8.6), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for row, (case, words) in zip(panels, CASES.items(), strict=True):
        for panel, (link, shape) in zip(row, LINKS.items(), strict=True):
            here = [r for r in results if (r["case"], r["link"]) == (case, link) and r.get("losses")]
            for r in here:
                at, losses = zip(*r["losses"], strict=True)
                panel.plot(at, losses, color=COLOURS[r["system"]], linewidth=1.8)
            panel.set_title(f"{shape.words}: {words}", loc="left", fontsize=9, color="#222222")
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", color="#dddddd", linewidth=0.6)
            panel.set_ylim(top=LOSS_TOP)
            if not here:
                panel.text(0.5, 0.5, "not run", transform=panel.transAxes, ha="center", color="#777777")
    for panel in panels[-1]:
        panel.set_xlabel("seconds of training")
    for row in panels:
        row[0].set_ylabel("held-out loss, nats per byte")
    there = {r["system"] for r in results}
    lines = [plt.Line2D([], [], color=COLOURS[system], label=name) for system, name in NAMES.items() if system in there]
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- tables


def _case(results: Sequence[Result]) -> str:
    rows = [
        "| link | system | trained tokens/s | merged tokens/s | stall: median / p99 / max | bytes per token | loss |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in results:
        head = f"| {LINKS[r['link']].words} | {NAMES[r['system']]} "
        if "failed" in r:
            rows.append(f"{head}| could not: {_cell(r['failed'])} | | | | |")
            continue
        starred = " *" if r["deaths"] else ""
        rows.append(
            f"{head}| {r['trained_per_s']:.0f}{starred} | {r['merged_per_s']:.0f} | {_stalls(r)} ms "
            f"| {r['bytes_per_token']:,.0f} | {loss_at_end(r):.2f} |"
        )
    return "\n".join(rows)


def _longer(results: Sequence[Result]) -> str:
    """The same runs, longer, with more than one seed."""
    rows = [
        "| link | system | merged tokens/s | loss after 105 s, of each seed | after 200 s | mean after 200 s |",
        "| --- | --- | ---: | --- | --- | ---: |",
    ]
    for link, system in dict.fromkeys((r["link"], r["system"]) for r in results if "failed" not in r):
        found = [r for r in results if (r["link"], r["system"]) == (link, system) and "failed" not in r]
        half, whole = ([loss_at(r, seconds) for r in found] for seconds in (105.0, 200.0))
        rows.append(
            f"| {LINKS[link].words} | {NAMES[system]} | {fmean(r['merged_per_s'] for r in found):.0f} "
            f"| {', '.join(f'{x:.3f}' for x in half)} | {', '.join(f'{x:.3f}' for x in whole)} | {fmean(whole):.3f} |"
        )
    return "\n".join(rows)


def _deaths(results: Sequence[Result]) -> str:
    rows = ["| run | processes that ended by themselves | the first one's last words |", "| --- | ---: | --- |"]
    for r in results:
        if r.get("deaths"):
            words = f"{NAMES[r['system']]}, {LINKS[r['link']].words}, {CASES[r['case']]}"
            rows.append(f"| {words} | {len(r['deaths'])} | {_cell(r['deaths'][0])} |")
    return "\n".join(rows) if len(rows) > 2 else "No process ended by itself in any run."


def _goals(results: Sequence[Result]) -> str:
    at = {(r["system"], r["link"], r["case"]): r for r in results if "failed" not in r}
    rows = ["| goal | result | |", "| --- | --- | --- |"]
    rows += _speed(at, "100mbit", "plain", 10.0, ["ddp"], "torch DDP")
    rows += _speed(at, "100mbit", "plain", 1.5, ["torchft", "hivemind"], "the best peer")
    rows += _speed(at, "20mbit", "plain", 2.5, PEERS, "the best peer")
    for link in ("100mbit", "20mbit"):
        rows += _no_worse(at, link)
    for case in ("slow", "killed"):
        for link in LINKS:
            rows += _steady(at, link, case)
            rows += _speed(at, link, case, 3.0, PEERS, "the best peer")
    return "\n".join(rows)


def _speed(
    at: dict[tuple[str, str, str], Result], link: str, case: str, goal: float, peers: Sequence[str], whom: str
) -> list[str]:
    ours = at.get(("ours", link, case))
    there = {p: at[p, link, case]["merged_per_s"] for p in peers if (p, link, case) in at}
    if ours is None or not there:
        return []
    best = max(there, key=lambda p: there[p])
    name = f"{LINKS[link].words}, {CASES[case]}: merged tokens/s >= {goal:g} x {whom}"
    if there[best] <= 0:
        return [f"| {name} | no peer merged anything | won |"]
    ratio = ours["merged_per_s"] / there[best]
    return [f"| {name} | {ratio:.1f} x {NAMES[best]} | {_verdict(ratio >= goal)} |"]


def _no_worse(at: dict[tuple[str, str, str], Result], link: str) -> list[str]:
    ours = at.get(("ours", link, "plain"))
    peers = {p: at[p, link, "plain"] for p in PEERS if (p, link, "plain") in at}
    if ours is None or not peers:
        return []
    best = min(peers, key=lambda p: loss_at_end(peers[p]))
    mine, theirs = loss_at_end(ours), loss_at_end(peers[best])
    name = f"{LINKS[link].words}, {CASES['plain']}: loss not worse at equal wall-clock"
    return [f"| {name} | {mine:.2f}, the best peer ({NAMES[best]}) {theirs:.2f} | {_verdict(mine <= theirs)} |"]


def _steady(at: dict[tuple[str, str, str], Result], link: str, case: str) -> list[str]:
    ours = at.get(("ours", link, case))
    if ours is None:
        return []
    name = f"{LINKS[link].words}, {CASES[case]}: no stall of an honest worker over {1000 * STALL_MAX_S:g} ms"
    longest = ours["stall_max_s"]
    return [f"| {name} | longest {1000 * longest:.0f} ms | {_verdict(longest <= STALL_MAX_S)} |"]


def _verdict(won: bool) -> str:
    return "won" if won else "**lost**"


def _stalls(r: Result) -> str:
    return " / ".join(f"{1000 * r[f'stall_{which}_s']:,.0f}" for which in ("median", "p99", "max"))


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:200]
