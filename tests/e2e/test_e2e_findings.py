"""What is done to a cluster of processes is found by every view, with one code, and is over once it is undone.

The views are those of a person: what `diloco up` prints, its live page, `diloco status`, its JSON with --strict, and
`diloco doctor`. What else is found, and in which words: unit/test_findings.py.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest
from test_e2e_up import Up

from diloco_common.errors import EXIT_CANNOT_CONNECT, EXIT_TERMINATED
from diloco_common.wire.addresses import read_address
from diloco_deploy.status import EXIT_DEGRADED
from processes import DEADLINE_S, TINY, Script, run_module, until

SETTINGS = {"sync.quorum": 2, "lease.lease_s": 2, "lease.heartbeat_s": 0.5, "run.tokens": 0}

Found = set[tuple[str, str]]
"""Code and member."""


class Views:
    def __init__(self, up: Up) -> None:
        self._told = 0  # of what up has said
        self._up = up
        shown = until(lambda: re.search(r"(http://[^/\s]+)/(?:#key=(\S+))?", self.console()), "the address of the page")
        self._page = urllib.request.Request(f"{shown[1]}/events", headers={"Authorization": f"Bearer {shown[2]}"})

    def console(self) -> str:
        return self._up.log.read_text() if self._up.log.exists() else ""

    def json(self) -> Found:
        ended = self._status("--json", "--strict")
        if ended.returncode == EXIT_CANNOT_CONNECT:  # nobody is up yet
            return {("CANNOT_CONNECT", "")}
        said = json.loads(ended.stdout)
        found = {(one["code"], one["member"]) for one in said["problems"]}
        assert ended.returncode == (EXIT_DEGRADED if found else 0)
        return found

    def terminal(self) -> str:
        return self._status().stdout

    def page(self) -> Found:
        """The first that the page is told."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(self._page) as stream:
            state = next(json.loads(line[5:]) for line in stream if line.startswith(b"data:"))
        return {(one["code"], one["member"]) for one in state["findings"]}

    def doctor(self) -> set[str]:
        ended = run_module("diloco_deploy", "doctor", "--folder", str(self._up.folder), "--json")
        return {one["code"] for one in json.loads(ended.stdout)["findings"] if one["check"] == "cluster"}

    def all_say(self, code: str, member: str) -> None:
        began, found, said = time.monotonic(), (code, member), self.console()
        looks: dict[str, Callable[[], bool]] = {
            "json": lambda: found in self.json(),
            "page": lambda: found in self.page(),
            "console": lambda: f"[{code}]" in self.console()[self._told :],
            "terminal": lambda: f"[{code}]" in self.terminal(),
            "doctor": lambda: code in self.doctor(),
        }

        def await_one(view: str) -> None:
            until(looks[view], f"{view} to say {found}; up said:\n{said}")
            print(f"{time.monotonic() - began:5.1f} s  {view} says {code}")

        with ThreadPoolExecutor(len(looks)) as pool:  # at the same time, as what one says may be over a moment later
            for waited in [pool.submit(await_one, view) for view in looks]:
                waited.result()

    @contextmanager
    def is_over(self, code: str, member: str) -> Iterator[None]:
        self._told, found = len(self.console()), (code, member)
        yield
        began = time.monotonic()
        until(lambda: found not in self.json() | self.page(), f"{found} to be over")
        until(lambda: f"{member}: {code} is over" in self.console()[self._told :], f"up to say that {found} is over")
        print(f"{time.monotonic() - began:5.1f} s  {code} is over")

    def _status(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return run_module("diloco_deploy", "status", "--folder", str(self._up.folder), *flags)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two shards and two workers that merge."""
    folder = tmp_path_factory.mktemp("findings") / "run"
    run = Up(folder, 2, 2, 0, **{**SETTINGS, "shard.data_dir": folder.with_name("disk")})
    try:
        run.await_merging()
        yield run
    finally:
        run.kill()


@contextmanager
def a_data_folder_is_gone(up: Up) -> Iterator[None]:
    data, elsewhere = (up.folder.with_name("disk") / name for name in ("shard-1", "elsewhere"))
    data.rename(elsewhere)
    yield
    elsewhere.rename(data)


@contextmanager
def a_worker_is_frozen(up: Up) -> Iterator[None]:
    """The other one alone is too few for a round."""
    address = read_address(up.folder / "run" / "worker-1.json")
    assert address is not None
    (frozen,) = (child for child in up.children if child.pid == address.pid)
    frozen.suspend()
    yield
    frozen.resume()


LONG_STEP = """
import sys, time
from diloco_common.settings import ModelSettings
from diloco_demo.gpt import build_gpt
from diloco_worker import join

model = build_gpt(ModelSettings.model_validate_json(sys.argv[3]), seed=0)
with join(sys.argv[1].split(","), model, run=sys.argv[2], learner_id="slow"):
    time.sleep(600)
"""


@contextmanager
def one_is_in_a_long_step(up: Up) -> Iterator[None]:
    """A learner, until SIGTERM ends it."""
    addresses, run = ",".join(up.grpc(shard) for shard in up.shards), up.status("shard-0")["run"]
    model = {key.removeprefix("model."): value for key, value in TINY.items() if key.startswith("model.")}
    folder = up.folder.with_name("slow")
    folder.mkdir()
    with Script(LONG_STEP, addresses, run, json.dumps(model), folder=folder) as one:
        until(lambda: any(one["id"] == "slow" for one in up.status("shard-0")["learners"]), "it to join")
        yield
        one.send_signal(signal.SIGTERM)
        assert one.wait(DEADLINE_S) == EXIT_TERMINATED, one.err


Done = Callable[[Up], AbstractContextManager[None]]
TABLE: list[tuple[Done, str, str]] = [
    (a_data_folder_is_gone, "STORAGE", "shard-1"),
    (one_is_in_a_long_step, "STALLED", "slow"),
    (a_worker_is_frozen, "WORKER_AWAY", "worker-1"),
    (a_worker_is_frozen, "NO_PROGRESS", "shard-0"),
]
AT_THE_GATE = TABLE[2:]


@pytest.mark.parametrize(
    ("done", "code", "member"),
    [
        pytest.param(*row, marks=[pytest.mark.gate] * (row in AT_THE_GATE), id=f"{row[0].__name__} {row[1]}")
        for row in TABLE
    ],
)
def test_every_view_finds_it_and_that_it_is_over(up: Up, done: Done, code: str, member: str) -> None:
    views = Views(up)
    until(lambda: not views.json() and not views.page(), "all to be well")
    with views.is_over(code, member), done(up):
        views.all_say(code, member)
