"""Some of the fuzzers start a real shard; they borrow what starts it from tests/attacks and tests/e2e."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("attacks", "e2e"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
