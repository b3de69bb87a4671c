"""Fuzz everything that comes from outside.

    python tests/fuzz/run.py                              # 100,000 messages: some minutes
    python tests/fuzz/run.py --messages 5000 --seed 7
    python tests/fuzz/run.py --part versions --seed 1 --only 638    # one case again

Prints how many were offered, with which seed, and how they were answered. Exits with 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "attacks"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import answers
import files
import messages
import wire
from fuzzing import Result, offer_all

Run = Callable[[int, range], Result]


def parts(folder: Path) -> dict[str, tuple[float, Run]]:
    """Name -> its share of all messages, and how it is run with a seed and the numbers of its cases."""

    def inside(name: str, draw: Any, answer: Any) -> Run:
        return partial(offer_all, name, draw, answer)

    return {
        "answers": (0.10, answers.offer),
        "calls": (0.34, partial(wire.fuzz_calls, folder / "calls")),
        "http": (0.10, partial(wire.fuzz_http, folder / "http")),
        "messages": (0.20, inside("messages", messages.draw, messages.answer)),
        "versions": (0.20, inside("versions", files.draw_version, files.answer_version)),
        "manifests": (0.06, inside("manifests", files.draw_manifest, files.answer_manifest)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz everything that comes from outside.")
    parser.add_argument("--messages", type=int, default=100_000, help="how many, over all parts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", help="this one alone")
    parser.add_argument("--only", type=int, help="this case alone, of the part that is named")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    args = parser.parse_args()
    told, offered, findings = {}, 0, 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        known = parts(Path(folder))
        if args.part is not None and args.part not in known:
            parser.error(f"--part is one of {', '.join(known)}")
        if args.only is not None and args.part is None:
            parser.error("--only needs --part")
        for name, (share, run) in known.items():
            if args.part not in (None, name):
                continue
            count = args.messages if args.part else round(share * args.messages)
            numbers = range(count) if args.only is None else range(args.only, args.only + 1)
            began = time.monotonic()
            result = run(args.seed, numbers)
            offered += result.offered
            findings += sum(result.kinds.values())
            _print(name, result, time.monotonic() - began)
            told[name] = {"answers": result.answers, "findings": [str(finding) for finding in result.findings]}
    print(f"\n{offered} messages with seed {args.seed}: {findings} findings")
    if args.json is not None:
        args.json.write_text(json.dumps({"messages": offered, "seed": args.seed, "parts": told}, indent=2) + "\n")
    return 1 if findings else 0


def _print(name: str, result: Result, seconds: float) -> None:
    answers = ", ".join(f"{code} {count}" for code, count in result.answers.most_common())
    print(f"{name}: {result.offered} in {seconds:.1f} s: {answers}")
    for kind, count in result.kinds.items():
        print(f"  FOUND {count} times: {kind[:200]}")
    for finding in result.findings:
        print(f"  {str(finding)[:2000]}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
