"""Draws docs/images/demo.png: `make demo` on a terminal, after a killed worker has come back. Needs Chromium.

python tools/demo_picture.py
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
from pathlib import Path

from rich.console import Console

from diloco_common.settings_loader import load
from diloco_common.wire.addresses import read_address
from diloco_deploy.run import up
from diloco_deploy.run.folder import Outputs
from diloco_deploy.terminal import Snapshot, view

PICTURE = Path(__file__).resolve().parent.parent / "docs/images/demo.png"
DEMO = ("cluster.shards=2", "cluster.workers=3", "run.tokens=1_500_000", "sync.merge=mean", "cluster.page=")
VICTIM, KILL_AT, DRAW_AT = "worker-1", 0.25, 0.75
WIDTH, EVENTS = 80, 13


class Camera:
    """Replaces the display of `diloco up`: keeps the messages, kills a worker, and takes one picture."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._told = folder, list[str]()
        self._is_killed = False
        self.svg = ""

    def show(self, snapshot: Snapshot, now: float) -> None:
        totals = snapshot.cluster.totals()
        share = totals.tokens_merged / max(1, totals.tokens_budget)
        if share >= KILL_AT and not self._is_killed:
            self._is_killed = True
            victim = read_address(self._folder / "run" / f"{VICTIM}.json")
            assert victim is not None
            os.kill(victim.pid, signal.SIGKILL)
        is_back = any(f"{VICTIM} returned" in line for line in self._told)
        if share >= DRAW_AT and is_back and not self.svg:
            console = Console(file=io.StringIO(), record=True, force_terminal=True, width=WIDTH)
            for line in self._told[-EVENTS:]:
                console.print(line, highlight=False)
            console.print(view(snapshot, WIDTH))
            self.svg = console.export_svg(title="make demo")

    def tell(self, text: str) -> None:
        self._told.append(text)
        print(text, flush=True)

    def close(self) -> None:
        pass


def draw(svg: str, path: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1200, "height": 800})
        page.route("**/*", lambda route: route.abort())  # rich refers to fonts on another host; monospace will do
        page.set_content(f"<style>body {{ margin: 0 }} svg {{ display: block; width: 1190px }}</style>{svg}")
        page.locator("svg").first.screenshot(path=path, omit_background=True)
        chromium.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = load(None, {}, [*DEMO, f"cluster.folder={folder}"]).settings
        camera = Camera(Path(folder))
        up.display_for = lambda console: camera  # type: ignore[attr-defined]
        up.bring_up(settings, Outputs())
    assert camera.svg, "the worker was not back before the run ended"
    draw(camera.svg, PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()
