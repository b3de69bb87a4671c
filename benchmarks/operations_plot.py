"""Draws what Prometheus saw of a worker that was killed and came back."""
from pathlib import Path
from typing import Any
def draw(found: dict[str, Any], picture: Path) -> None: ...
