"""What a person sees on the live page of a real run, in a real browser, while workers and shards die and return."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from browser import DESKTOP, PHONE, Browser, axe, browsing
from processes import LocalCluster, environment, until

pytestmark = pytest.mark.xdist_group("network")  # Chromium drops what is loading when an interface comes or goes
ROW = "#learners tbody tr:has(th:text-is('{}'))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("web") / "run", keeps=True) as cluster:
        yield cluster.start(shards=2, workers=["ann", "bob"])


@pytest.fixture(scope="module")
def url(cluster: LocalCluster) -> Iterator[str]:
    """Of `diloco web`, as somebody would type it."""
    shards = ",".join(shard.endpoints.http for shard in cluster.shards)
    log = cluster.folder / "web.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "diloco_common.process", str(os.getpid()), "diloco_deploy", "web"]
        page = subprocess.Popen([*command, f"--shards={shards}", "--listen=127.0.0.1:0"], stdout=file, stderr=file,
                                env=environment())  # fmt: skip
    try:
        found = until(lambda: re.search(r"http://\S+", log.read_text()), "the address of the page")
        yield found[0]
        page.send_signal(signal.SIGINT)
        assert page.wait(120) == 0, log.read_text()
    finally:
        page.kill()
        page.wait()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({**DESKTOP, "color_scheme": "light"}, id="light"),
        pytest.param({**PHONE, "color_scheme": "dark"}, id="phone, dark", marks=pytest.mark.gate),
    ],
)
def test_the_page_has_no_fault_that_axe_finds(url, browser, how):
    script = axe()
    with browser.visit(url, **how) as visit:
        visit.sees("#learners tbody", "ann", "bob")
        visit.sees("#shards tbody", "serving")
        visit.page.evaluate(script)
        found = visit.page.evaluate("axe.run()")["violations"]
        wide = visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [(v["impact"], v["id"], [n["html"] for n in v["nodes"]]) for v in found] == []
    assert wide, "the page is wider than the window"


def test_words_and_rounds_are_there_for_the_keyboard(url, browser):
    with browser.visit(url) as visit:
        visit.sees("#learners tbody", "ann")
        visit.page.focus("[data-word='fragment']")
        visit.sees("#tip", "A part of the model that is synchronized on its own.")
        visit.page.keyboard.press("Escape")
        assert visit.page.is_hidden("#tip")
        visit.page.focus("#picture")
        visit.page.keyboard.press("ArrowLeft")
        visit.sees("#round", "fragment", "round", "opened")
        assert visit.page.get_attribute("#canvas", "aria-label")[0].isdigit()


def test_a_person_sees_who_dies_and_who_returns(url, browser, cluster):
    with browser.visit(url) as visit:
        ann = ROW.format("ann")
        visit.sees("#here", "2 of 2 learners, 2 of 2 shards", "Everybody is here")
        visit.sees("#lost", "Nothing lost")
        visit.sees(ann, "training", "merged")

        cluster.workers["ann"].kill()
        cluster.shards[1].kill()
        visit.sees(ann, "away", "since")
        visit.sees("#here", "1 of 2 learners, 1 of 2 shards", "shard-1 is away")
        visit.sees("#shards tbody", "away", "since", "connection refused")
        visit.sees("#events", "ann fell silent; its lease ended", "shard-1 does not answer")

        cluster.shards[1].start()
        cluster.workers["ann"].start()
        visit.sees("#here", "2 of 2 learners, 2 of 2 shards", "Everybody is here")
        visit.sees(ann, "training")
        visit.sees("#events", "shard-1 started again", "ann came back")

        visit.page.evaluate("document.querySelector('#rounds-details').open = true")
        visit.sees("#rounds-table", "shard-0", "shard-1")
    assert visit.said == []
    assert visit.hosts == {url.split("/")[2]}


@pytest.mark.gate
def test_when_no_shard_answers_the_page_says_so(url, browser, cluster):
    with browser.visit(url) as visit:
        visit.sees("#here", "2 of 2 shards")
        for shard in cluster.shards:
            shard.kill()
        visit.sees("#banner", "No shard answers since", "What you see is from before", "connection refused")
        visit.sees("#learning", "Not known")
        visit.sees(ROW.format("bob"), "not known")
        for shard in cluster.shards:
            shard.start()
        visit.page.wait_for_selector("#banner", state="hidden")
        visit.sees("#here", "2 of 2 shards")
    assert visit.said == []
