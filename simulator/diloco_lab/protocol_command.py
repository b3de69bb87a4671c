"""What `diloco lab protocol` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_common.command import check_outputs
from diloco_common.errors import EXIT_OK, ConfigError
from diloco_lab.arms import Arm
from diloco_lab.protocol import carry_out, load_protocol
from diloco_lab.protocol_page import page
from diloco_lab.runner import Line, run_all


def protocol(path: Path, out: Path, jobs: int, page_file: Path | None, track: str, say: Callable[[str], None]) -> int:
    """Run what is missing of a protocol; the page is written anew after every seed. Raises ConfigError."""
    if jobs < 1:
        raise ConfigError("--jobs takes a number from 1")

    def run_missing(arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, Line]:
        return run_all(arms, seeds, out, jobs, say, track)

    check_outputs(out, page_file)
    text = ""
    for cells, lines in carry_out(load_protocol(path), run_missing):
        text = page(cells, lines)
        if page_file is not None:
            page_file.write_text(text)
    say("\n" + text)
    return EXIT_OK
