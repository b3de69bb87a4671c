"""`diloco explain`: finds a code and prints its explanation."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator
from json import dumps
from typing import Annotated

from cyclopts import Parameter

from diloco_common.errors import ConfigError
from diloco_common.options import Json
from diloco_deploy.codes import ALERTS, ERRORS, EXITS, FINDINGS, OUTCOMES, WORDS, Entry, Kind

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
