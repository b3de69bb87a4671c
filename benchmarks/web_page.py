"""What the live page costs with many learners: first paint in a browser, CPU of its server, bytes for each viewer.

    python benchmarks/web_page.py --learners 200 --seconds 20 [--shots FOLDER]

Two shards, light learners (`light_learners.py`) that report a loss and contribute when asked, some of which vanish, and
`diloco web` beside them. Chromium is needed, and playwright.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from diloco_common import protobuf
from diloco_common.manifest import cut
from diloco_common.messages import Progress
from light_learners import (
    SCHEDULER_CLOCK,
    TOKENS_PER_STEP,
    Accepted,
    LightLearner,
    noise_of,
    running_shards,
    tensors_of,
)

SHARDS, FRAGMENTS, SYNC_EVERY = 2, 12, 12
STEP_S = 1.0
VANISH = 5


class ReportingLearner(LightLearner):
    """A light learner with a loss, for a page to look at."""

    step_s = STEP_S
    began = 0.0

    async def report(self) -> None:
        loss = 2.0 + 6.0 * math.exp(-self._inner_step / 40) + random.gauss(0, 0.05)
        progress = Progress(self._inner_step, self._inner_step * TOKENS_PER_STEP, loss, self.step_s)
        async with self._writing:
            await self._stream.write(protobuf.progress_to_pb(progress))

    async def live(self) -> None:
        """Train and contribute, until cancelled."""
        contributing = asyncio.create_task(self._contribute())
        try:
            for step in range(1, 1_000_000):
                await asyncio.sleep(self.step_s)
                await self.step(step)
        finally:
            contributing.cancel()

    async def _contribute(self) -> None:
        while True:
            with contextlib.suppress(AssertionError):  # it came late: a real learner would carry it
                await self.contribute_to(1)


async def crowd(learners: int, addresses: list[Any], ready: asyncio.Event, over: asyncio.Event) -> None:
    """Learners at all shards, until it is over; some of them vanish once everything is ready."""
    manifest = cut(tensors_of(200_000), FRAGMENTS, SHARDS)
    accepted, found = Accepted(), []
    for index, shard in enumerate(addresses):
        fragments = manifest.owned_by(index)
        contributions = noise_of(fragments, 1e-3, "int8")
        here = [ReportingLearner(f"light-{i:03}", shard, manifest, fragments, contributions, accepted)
                for i in range(learners)]  # fmt: skip
        for i, one in enumerate(here):
            one.step_s = STEP_S * (1 + 0.02 * (i % 50))
        await here[0].join()
        await here[0].seed(noise_of(fragments, 1e-2, "float32"))
        await asyncio.gather(*(one.join() for one in here[1:]))
        found.append(here)
    lives = [[asyncio.create_task(one.live()) for one in here] for here in found]
    ready.set()
    await asyncio.sleep(15)
    for here, tasks in zip(found, lives, strict=True):
        for i in random.Random(1).sample(range(learners), min(VANISH, learners - 1)):
            tasks[i].cancel()
            await here[i].leave()
    await over.wait()
    for task in (task for tasks in lives for task in tasks):
        task.cancel()
    await asyncio.gather(*(one.leave() for here in found for one in here), return_exceptions=True)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    return time.clock_gettime(~pid << 3 | SCHEDULER_CLOCK)


def look(url: str, pid: int, seconds: float, shots: Path | None) -> dict[str, Any]:
    """In a browser: paints, CPU of the server without and with a viewer, bytes."""
    from playwright.sync_api import sync_playwright

    time.sleep(5)
    before = cpu_s(pid)
    time.sleep(seconds)
    alone = (cpu_s(pid) - before) / seconds
    paints = []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for _ in range(5):
            page = chromium.new_page()
            page.goto(url)
            page.wait_for_selector("#learners tbody tr")
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            page.close()
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        page.wait_for_selector("#learners tbody tr")
        before = cpu_s(pid)
        page.wait_for_timeout(1000 * seconds)
        watched = (cpu_s(pid) - before) / seconds
        if shots is not None:
            page.screenshot(path=shots / "many.png", full_page=True)
        chromium.close()
    return {
        "first_paint_ms": round(statistics.median(paints)), "paints_ms": [round(p) for p in paints],
        "cpu_share_alone": round(alone, 4), "cpu_share_with_a_viewer": round(watched, 4),
        "rss_mb": int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) // 1024,  # type: ignore[index]
    }  # fmt: skip


def beside(shards: list[str], seconds: float, shots: Path | None) -> dict[str, Any]:
    """Start `diloco web`, look at it, and end it."""
    command = [sys.executable, "-u", "-m", "diloco_common.child", str(os.getpid()), "diloco_deploy", "web"]
    listening = [*command, f"--shards={','.join(shards)}", "--listen=127.0.0.1:0"]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            url = re.findall(r"http://\S+", page.stdout.readline())[-1]
            return look(url, page.pid, seconds, shots)
        finally:
            page.terminate()


async def measure(learners: int, seconds: float, shots: Path | None) -> dict[str, Any]:
    settings = [f"sync.fragments={FRAGMENTS}", f"sync.sync_every={SYNC_EVERY}", "lease.lease_s=10"]
    with running_shards(SHARDS, *settings) as shards:
        ready, over = asyncio.Event(), asyncio.Event()
        crowding = asyncio.create_task(crowd(learners, shards, ready, over))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({crowding, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if crowding.done():
            await crowding
        try:
            return await asyncio.to_thread(beside, [shard.http for shard in shards], seconds, shots)
        finally:
            over.set()
            await crowding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--shots", type=Path, help="folder for a screenshot")
    args = parser.parse_args()
    print(json.dumps({"learners": args.learners, **asyncio.run(measure(args.learners, args.seconds, args.shots))}))


if __name__ == "__main__":
    main()
