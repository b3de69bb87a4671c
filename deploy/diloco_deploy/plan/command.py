"""`diloco plan`: prints the plan, its formulas, and settings to paste."""

from __future__ import annotations

import json
from collections.abc import Iterator

from diloco_deploy import units
from diloco_deploy.plan.choice import LINK_SHARE, Asked, Choice, Encodings, bit_rate, choose
from diloco_deploy.plan.table import figures, learner_figures, lines_of, process_figures, settings_of, toml


def plan(asked: Asked, *, as_json: bool = False) -> int:
    """Print what `choose` proposes. Exit code 1 if the link carries none of it."""
    choice = choose(asked)
    if not as_json:
        print("\n".join(_said(asked, choice)), flush=True)  # what a learner holds takes torch: seconds to load
    rows = [*figures(asked, choice), *learner_figures(asked, choice)]
    if as_json:
        found = {
            "fits": choice.fits, "settings": settings_of(asked, choice),
            "why": {
                "encodings": choice.why_encodings, "every": choice.why_every, "fragments": choice.why_fragments,
                "shards": choice.why_shards,
            },
            "figures": [row._asdict() for row in rows],
        }  # fmt: skip
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(["", "figures, at these settings:", *lines_of(rows)]))
        print(f"\nsettings (run.toml):\n\n{toml(settings_of(asked, choice))}", end="")
    return 0 if choice.fits else 1


def _said(asked: Asked, choice: Choice) -> Iterator[str]:
    link = asked.link
    yield (
        f"{units.count(asked.params)} parameters (N), {asked.learners} learners (L), {asked.step_s:g} s per inner step "
        f"(t), {bit_rate(link.up)} up, {bit_rate(link.down)} down, {1000 * link.round_trip_s:g} ms there and back"
    )
    if not choice.fits:
        yield ""
        yield f"This link carries nothing that we would propose: H = {choice.every} is far beyond what was measured."
        yield "Train several machines of one place as one learner (docs/islands.md), or find a faster link."
    yield ""
    yield f"  push {choice.encodings.push}, pull {choice.encodings.pull}: {choice.why_encodings}"
    yield f"  H = {choice.every}: {choice.why_every}"
    yield f"  P = {choice.fragments}: {choice.why_fragments}"
    yield f"  S = {choice.shards}: {choice.why_shards}"
    yield f"  (the run may take {LINK_SHARE:.0%} of a link, core or disk; the rest is for bursts and repeats)"


def memory(
    params: int, encodings: Encodings, fragments: int, ranks: int, under_way: int, *, as_json: bool = False
) -> int:
    """Print what one process of a learner of so many ranks holds."""
    rows = process_figures(params, encodings, fragments, under_way, ranks)
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return 0
    print(f"each of {ranks} rank{'s' * (ranks > 1)} of a learner with {units.count(params)} parameters:")
    print("\n".join(lines_of(rows)))
    return 0
