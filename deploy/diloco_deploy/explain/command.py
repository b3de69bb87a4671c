"""`diloco explain`: prints what a code means, what to look at and what to do."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from diloco_deploy.explain.catalogue import CODES, find, of_kind
from diloco_deploy.explain.entry import Entry, Kind

WIDTH = 100


def explain(code: str = "", *, as_json: bool = False) -> int:
    """Explain one code, or list all. Raises ConfigError for a code that there is not."""
    entries = [find(code)] if code else list(CODES.values())
    if as_json:
        import json

        found = [{**vars(entry), "kind": entry.kind.value} for entry in entries]
        print(json.dumps(found[0] if code else found, indent=2))
    else:
        print("\n".join(_one(entries[0]) if code else _all()))
    return 0


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
    """For a terminal: links as words with their page, no marks of tables."""
    text = re.sub(r"\[([^\]]+)\]\(#[\w-]+\)", r"\1", markdown)
    text = re.sub(r"\[([^\]]+)\]\(runbook\.md#\w+\)", r"\1 (diloco explain \1)", text)
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r"\1 (docs/\2)", text)
    text = re.sub(r"^\|[ |-]+\|$\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"^\| (.*) \|$", lambda row: "- " + row[1].replace(" | ", ": "), text, flags=re.MULTILINE)
