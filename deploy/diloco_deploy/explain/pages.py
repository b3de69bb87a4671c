"""The parts of docs/errors.md and docs/runbook.md that are made from the entries. What is around them is written there.

A part stands between `<!-- explain: NAME -->` and `<!-- end -->`. `tools/explained.py` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from diloco_deploy.explain.catalogue import of_kind
from diloco_deploy.explain.codes import Entry, Kind

_PART = re.compile(r"(<!-- explain: ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\([^)]+\)")


def with_parts(page: str) -> str:
    """The page with its parts made anew. Raises KeyError for a part that does not exist."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", page)


def _calls() -> str:
    rows = (f"| `{e.code}` | {e.status} | {e.means} | {_deed(e)} |" for e in of_kind(Kind.CALL))
    return _table("code | gRPC status | meaning | what to do", rows)


def _rejections() -> str:
    also = [e.code for e in of_kind(Kind.CALL) if "rejected contributions" in e.also]
    first = f"| {', '.join(f'`{code}`' for code in also)} | as above | |"
    rows = (
        f"| `{e.code}` | {e.means}{f' Also {e.also}.' if e.also else ''} | {_deed(e)} |"
        for e in of_kind(Kind.CONTRIBUTION)
    )
    return _table("code of a rejected contribution | meaning | what to do", [first, *rows])


def _with_exit_code(*kinds: Kind) -> Callable[[], str]:
    def part() -> str:
        rows = (f"| `{e.code}` ({_ends(e)}) | {e.means} | {_deed(e)} |" for e in of_kind(*kinds))
        return _table("code | meaning | what to do", rows)

    return part


def _findings() -> str:
    rows = (f"| `{e.code}` | {e.means} | {_deed(e)} |" for e in of_kind(Kind.FINDING))
    return _table("code | meaning | what to do", rows)


def _outcomes() -> str:
    rows = (f"| `{e.code}` | {e.means} | {_deed(e)} |" for e in of_kind(Kind.OUTCOME))
    return _table("outcome | meaning | what to do", rows)


def _exits() -> str:
    return _table("code | meaning", (f"| {e.code} | {e.means} |" for e in of_kind(Kind.EXIT)))


def _alerts() -> str:
    return "\n".join(f"## {e.code}\n\n{e.means}\n\n{e.do}\n" for e in of_kind(Kind.ALERT))


def _deed(entry: Entry) -> str:
    """What to do, with the pages to look at; `diloco explain` says the rest of `look`."""
    pages = [page for page in _LINK.findall(entry.look) if page not in entry.do]
    return f"{entry.do} See {', '.join(pages)}." if pages else entry.do


def _ends(entry: Entry) -> str:
    words = ["logged"] if entry.is_logged else []
    return "; ".join([*words, *([] if entry.exit_code is None else [str(entry.exit_code)])])


def _table(head: str, rows: Iterable[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + " --- |" * columns, *(_spaced(row) for row in rows), ""])


def _spaced(row: str) -> str:
    """Without double spaces in empty cells."""
    return re.sub(r"\|  +\|", "| |", row).replace("|  |", "| |")


PARTS: dict[str, Callable[[], str]] = {
    "exits": _exits,
    "calls": _calls,
    "rejections": _rejections,
    "outcomes": _outcomes,
    "connecting": _with_exit_code(Kind.CONNECTING),
    "commands": _with_exit_code(Kind.COMMAND),
    "data": _with_exit_code(Kind.DATA),
    "checkpoints": _with_exit_code(Kind.CHECKPOINT),
    "findings": _findings,
    "alerts": _alerts,
}
