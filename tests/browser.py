"""A real browser, for what a person sees: Debian's Chromium, driven by Playwright. Without it, tests skip loudly."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from programs import CACHE, need
from waiting import until

AXE = "axe-core@4.14.1"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2
}  # fmt: skip
DEADLINE_S = 120.0


class Visit:
    """One open page, what it said on its console, and whom it called."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(1000 * DEADLINE_S)
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"uncaught: {error}"))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def sees(self, selector: str, *words: str) -> None:
        """Wait until the text of an element has all of these in it."""

        def shown() -> bool:
            text = " ".join(self.page.locator(selector).all_inner_texts())
            return all(word in text for word in words)

        try:
            until(shown, f"{selector} to say {words}", DEADLINE_S, every_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said {self.said}; the page:\n{self.page.inner_text('body')}") from None


class Browser:
    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    @contextmanager
    def visit(self, url: str, **how: Any) -> Iterator[Visit]:
        """`how`: of Playwright's new_context."""
        context = self._chromium.new_context(**(how or DESKTOP))
        try:
            visit = Visit(context.new_page())
            visit.page.goto(url)
            yield visit
        finally:
            context.close()


@contextmanager
def browsing() -> Iterator[Browser]:
    program = need("chromium", "Debian and Ubuntu: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield Browser(chromium)
        finally:
            chromium.close()


def axe() -> str:
    """The script of axe-core, by npm; skips the test where that cannot be had."""
    found = CACHE / "axe/package/axe.min.js"
    if not found.exists():
        found.parent.parent.mkdir(parents=True, exist_ok=True)
        get = ["sh", "-c", f"npm pack --silent {AXE} && tar xzf axe-core-*.tgz package/axe.min.js"]
        got = subprocess.run(get, cwd=found.parent.parent, capture_output=True, text=True, timeout=60, check=False)
        if got.returncode != 0:
            pytest.skip(f"axe-core cannot be had by npm: {got.stderr[-200:]}")
    return Path(found).read_text(encoding="utf-8")
