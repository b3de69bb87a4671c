"""For generated files, which nobody edits: writes them, or checks that they are up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def written(target: Path, text: str, description: str | None) -> int:
    """Write this text; with `--check`, only compare it. Returns the exit code: 1 if the file is out of date."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    check = parser.parse_args().check
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{target.relative_to(ROOT)} is out of date: run {Path(sys.argv[0]).name}", file=sys.stderr)
        return 1
    target.write_text(text, encoding="utf-8")
    return 0
