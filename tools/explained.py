"""Writes those parts of docs/errors.md and docs/runbook.md that `diloco explain` also shows (diloco_deploy/codes.py).

`python tools/explained.py` writes them, `--check` says whether they are up to date. Each part stands between `<!--
explain: NAME -->` and `<!-- end -->`. The rest of the page stays.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from diloco_deploy.codes import Entry, Kind, of_kind

_PART = re.compile(r"(<!-- explain: ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\([^)]+\)")


def with_parts(page: str) -> str:
    """The page with its parts regenerated. Raises KeyError for an unknown part."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", page)


def _list(kind: Kind) -> Callable[[], str]:
    """A line for each entry, with the gRPC status of a call, the exit code of an error, or whether it is logged."""
    return lambda: "\n".join(_line(entry) for entry in of_kind(kind)) + "\n"


def _line(entry: Entry) -> str:
    """The meaning, and what happens by itself. The message and `diloco explain` say what to do."""
    beside = entry.status if entry.kind is Kind.CALL else _ends(entry)
    also = f"Also {entry.also}." if entry.kind is Kind.CONTRIBUTION and entry.also else ""
    _, _, itself = entry.do.partition("Nothing: ")
    pages = ", ".join(_LINK.findall(f"{entry.do} {entry.look}"))
    words = (entry.means, also, itself[:1].upper() + itself[1:], f"See {pages}." if pages else "")
    return f"- `{entry.code}`{f' ({beside})' if beside else ''}: {' '.join(filter(None, words))}"


def _rejections() -> str:
    also = [f"`{e.code}`" for e in of_kind(Kind.CALL) if "rejected contributions" in e.also]
    return f"- {', '.join(also)}: as above.\n{_list(Kind.CONTRIBUTION)()}"


def _ends(entry: Entry) -> str:
    words = ["logged"] if entry.is_logged else []
    return "; ".join([*words, *([] if entry.exit_code is None else [str(entry.exit_code)])])


PARTS: dict[str, Callable[[], str]] = {
    "exits": lambda: "\n".join(f"- {e.code}: {e.means}" for e in of_kind(Kind.EXIT)) + "\n",
    "calls": _list(Kind.CALL),
    "rejections": _rejections,
    "connecting": _list(Kind.CONNECTING),
    "commands": _list(Kind.COMMAND),
    "data": _list(Kind.DATA),
    "checkpoints": _list(Kind.CHECKPOINT),
    "alerts": lambda: "\n".join(f"## {e.code}\n\n{e.means}\n\n{e.do}\n" for e in of_kind(Kind.ALERT)),
}


def main() -> int:
    from written import ROOT, written  # can be imported only if this file runs as a program

    targets = [ROOT / "docs" / name for name in ("errors.md", "runbook.md")]
    return max(written(target, with_parts(target.read_text(encoding="utf-8")), __doc__) for target in targets)


if __name__ == "__main__":
    sys.exit(main())
