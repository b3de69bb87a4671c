"""Some of the fuzzers start a real shard; they borrow what starts it from tests/attacks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "attacks"))
