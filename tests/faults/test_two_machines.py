"""docs/two-machines.md: what it tells a person to type, typed in a network namespace."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from networks import Namespace, need_namespaces

from diloco_common.wire.addresses import read_address
from diloco_deploy.cluster.asking import Asker
from pages import followed
from processes import TINY, environment, until
from statuses import fetch_status

pytestmark = pytest.mark.xdist_group("network")
DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCKS = followed(DOCS / "two-machines.md")
PROGRAMS = {"diloco": "diloco_deploy", "diloco-worker": "diloco_demo"}


class Terminal:
    """Runs blocks of a page in a folder, with a tiny model and our own sources."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, module in PROGRAMS.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
            (programs / name).chmod(0o755)
        own = environment()
        tiny = {f"DILOCO_{name.upper().replace('.', '__')}": str(value) for name, value in TINY.items()}
        self._variables = {**own, **tiny, "PATH": f"{programs}:{own['PATH']}", **variables}

    def type(self, commands: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c", commands]
        ended = subprocess.run(
            command, cwd=self._folder, env=self._variables, capture_output=True, text=True, timeout=200, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    @contextmanager
    def start(self, commands: str, log: Path, namespace: str = "") -> Iterator[None]:
        """What goes on until somebody ends it; here, the test."""
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        with log.open("wb") as said:
            process = subprocess.Popen(
                [*inside, "bash", "-euo", "pipefail", "-c", commands], cwd=self._folder, env=self._variables,
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
        try:
            yield
        finally:
            family = [process, *psutil.Process(process.pid).children(recursive=True)]
            for each in family:
                with suppress(psutil.NoSuchProcess):  # it may end with its parent
                    each.kill()
            process.wait(120)


def has_merged(run: Path, learner: str) -> bool:
    """Whether shard 0 of a cluster of `diloco up` has merged something of this learner."""
    found = read_address(run / "run/shard-0.json")
    status = fetch_status(found.http, 5.0, Asker(run / "certs/observer-up")) if found else None
    return status is not None and any(one["id"] == learner and one["merged"] > 0 for one in status["learners"])


def test_the_page_has_the_blocks_that_are_typed_here() -> None:
    assert list(BLOCKS) == ["start", "certificate", "join", "certificates"]


@pytest.mark.gate
def test_a_second_machine_joins_as_the_page_says(tmp_path: Path) -> None:
    need_namespaces("a second machine")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with Namespace() as far:
        far.plug_in()
        terminal = Terminal(here, {})
        start = BLOCKS["start"].replace("HERE=192.0.2.7", f"HERE={far.near}")
        assert start != BLOCKS["start"]
        with terminal.start(start, tmp_path / "here.log"):
            try:
                until(lambda: (here / "runs/two/certs/shard-1/cert.pem").exists(), "certificates")
                terminal.type(BLOCKS["certificate"])
                shutil.copytree(here / "runs/two/certs/learner-there", there / "learner-there")
                second = Terminal(there, {"HERE": far.near})
                with second.start(BLOCKS["join"], tmp_path / "there.log", far.name):
                    until(lambda: has_merged(here / "runs/two", "there"), "work of the second machine", seconds=200)
            except AssertionError:
                for log in (tmp_path / "here.log", tmp_path / "there.log"):
                    print(log.read_text(errors="replace") if log.exists() else f"no {log}")
                raise


@pytest.mark.gate
def test_twenty_machines_have_a_certificate_each(tmp_path: Path) -> None:
    Terminal(tmp_path, {}).type(BLOCKS["certificates"])
    made = {path.parent.name for path in tmp_path.glob("certs/*/key.pem")}
    assert made == {
        *(f"shard-{i}" for i in range(4)),
        *(f"learner-m{i:02}" for i in range(1, 21)),
        "observer-prometheus",
    }
