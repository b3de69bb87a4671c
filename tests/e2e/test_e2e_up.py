"""`diloco up` and what it leaves behind: a whole run, Ctrl-C, and the death of the command itself."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import load_file

from diloco_common.settings import Settings
from diloco_common.wire.addresses import read_address
from diloco_demo.data import load_corpus
from diloco_demo.gpt import build_gpt, evaluate
from forks import Forked
from processes import TINY, environment, http_get, sets, until

BUDGET = 60_000
WORKERS = ["worker-0", "worker-1"]
CALM = {"train.lr": 0.005, "lease.lease_s": 30, "worker.step_min_s": 0.01}
"""Nobody dies here but by a signal: a worker that gets no core for a while keeps its lease."""
CONTRIBUTION_BYTES = 0.6
"""Per parameter, at most: int4 codes and a scale per block."""
CHANGE_BYTES, VERSION_BYTES = 1.0, 2.0
"""Per parameter: int8 codes; bfloat16, for whoever lacks the version before."""
SEED_BYTES = 4.0


class Up:
    def __init__(self, folder: Path, shards: int, workers: int, tokens: int, **settings: object) -> None:
        self.folder = folder
        self.shards = [f"shard-{i}" for i in range(shards)]
        self.workers = [f"worker-{i}" for i in range(workers)]
        flags = [f"--shards={shards}", f"--workers={workers}", f"--tokens={tokens}", f"--folder={folder}"]
        arguments = ["up", *flags, *sets({**TINY, **CALM, **settings})]
        folder.mkdir(exist_ok=True)
        self.log = folder.with_name("up.log")
        self.log.unlink(missing_ok=True)
        self._process = Forked("diloco_deploy", arguments, self.log, environment(), forks_children=True)
        self.children: list[psutil.Process] = []

    def address(self, name: str) -> str:
        """Where a member serves HTTP, once it does."""
        path = self.folder / "run" / f"{name}.json"
        found = until(lambda: read_address(path), f"{name} to be up")
        return found.http

    def grpc(self, name: str) -> str:
        """Where a shard serves learners."""
        found = read_address(self.folder / "run" / f"{name}.json")
        assert found is not None
        return found.grpc

    def status(self, name: str) -> dict[str, Any]:
        return dict(json.loads(http_get(self.address(name), "/status")[1]))

    def await_merging(self) -> None:
        """Wait until every shard has merged something; by then all children are known."""
        for name in self.shards:
            until(lambda n=name: self.status(n)["rounds"] >= 4, f"rounds of {name}")  # type: ignore[misc]
        for name in self.workers:
            self.address(name)
        self.children = psutil.Process(self._process.pid).children(recursive=True)
        assert len(self.children) == len(self.shards + self.workers)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, seconds: float = 200) -> tuple[int, str]:
        return self._process.wait(seconds), self.log.read_text()

    def no_children_left(self) -> bool:
        return not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in self.children)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for child in self.children:
            if child.is_running():
                child.kill()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(shards: int = 1, workers: int = 1, tokens: int = 0) -> Up:
        started.append(Up(tmp_path_factory.mktemp("up") / "run", shards, workers, tokens))
        return started[-1]

    yield start
    for one in started:
        one.kill()


class Finished(NamedTuple):
    run: Up
    said: str
    report: dict[str, Any]


@pytest.fixture(scope="module")
def finished(up: Callable[..., Up]) -> Finished:
    run = up(shards=2, workers=len(WORKERS), tokens=BUDGET)
    run.await_merging()
    code, said = run.end()
    assert code == 0, said
    return Finished(run, said, json.loads((run.folder / "report.json").read_text()))


def test_a_run_ends_by_itself_and_leaves_no_child(finished: Finished) -> None:
    assert finished.run.no_children_left()
    assert "held-out loss" in finished.said
    assert str(finished.run.folder / "model.safetensors") in finished.said
    assert "Traceback" not in finished.said


def test_the_report_has_sane_values(finished: Finished) -> None:
    report = finished.report
    assert report["eval_loss_first"] == pytest.approx(5.545, abs=0.1), "nothing is known: ln 256"
    assert max(report["eval_loss_final"], report["train_loss_final"]) < report["eval_loss_first"] - 1.0
    assert BUDGET <= report["tokens_merged"] <= report["tokens"]
    assert sum(report["versions"].values()) == report["rounds"] > 0
    assert len(report["versions"]) == TINY["sync.fragments"]
    assert 1.0 <= report["participants_mean"] <= len(WORKERS)
    assert set(report["tokens_per_s"]) == set(report["sync_stall_s"]) | {"all"} == {*WORKERS, "all"}
    assert all(0 < stall_s < report["wall_s"] for stall_s in report["sync_stall_s"].values())
    assert (report["evictions"], report["seed"], report["interrupted"]) == (0, 0, False)
    assert report["settings"]["model"]["width"] == TINY["model.width"]


def test_bytes_are_what_the_encodings_imply(finished: Finished) -> None:
    """int4 up and int8 changes down: about 1.6 bytes per parameter, learner and round."""
    report = finished.report
    parameters, workers = report["evaluation"]["parameters"], len(WORKERS)
    merged = report["rounds"] * report["participants_mean"] / TINY["sync.fragments"] * parameters
    taken = (report["rounds"] + TINY["sync.fragments"]) * workers / TINY["sync.fragments"] * parameters
    assert 0.5 * merged < report["bytes_pushed"] < CONTRIBUTION_BYTES * taken + SEED_BYTES * workers * parameters
    seen = taken + workers * parameters  # every version, version 0 among them
    assert CHANGE_BYTES * workers * parameters < report["bytes_pulled"] <= VERSION_BYTES * seen


def test_the_exported_model_is_the_reported_one_in_plain_torch(finished: Finished) -> None:
    settings = Settings.model_validate(finished.report["settings"])
    model = build_gpt(settings.model, seed=1)
    missing, unexpected = model.load_state_dict(load_file(finished.run.folder / "model.safetensors"), strict=True)
    held_out = load_corpus(settings.data.source).held_out

    loss = evaluate(model, held_out, settings.model.context)

    assert (missing, unexpected) == ([], [])
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert loss == pytest.approx(finished.report["eval_loss_final"], abs=1e-4)


def test_ctrl_c_drains_and_says_where_things_lie(up: Callable[..., Up]) -> None:
    run = up()
    run.await_merging()
    run.signal(signal.SIGINT)
    code, said = run.end()

    report = json.loads((run.folder / "report.json").read_text())
    assert code == 130, said
    assert run.no_children_left()
    assert report["interrupted"] is True
    assert report["tokens"] > 0
    for words in ("interrupted", "report.json", str(run.folder / "logs"), "diloco resume"):
        assert words in said
    assert "killed" not in said, "everybody ended in order"
    for member in run.shards + run.workers:
        log = (run.folder / "logs" / f"{member}.log").read_text()
        assert "Traceback" not in log, log
    assert "draining" in (run.folder / "logs" / "shard-0.log").read_text()


def test_when_everything_is_killed_the_same_command_goes_on(tmp_path: Path) -> None:
    """reliability.md 6: no announced version is lost, workers go on from their own checkpoints, and the run ends."""
    settings = {"worker.checkpoint_every_s": 0.5, "train.average_momentum": "true"}
    first = Up(tmp_path / "run", 2, 2, 60_000, **settings)
    try:
        first.await_merging()
        until(lambda: all((tmp_path / "run" / w / "checkpoint.safetensors").exists() for w in first.workers), "files")
        before = {name: first.status(name) for name in first.shards}
    finally:
        first.kill()

    second = Up(tmp_path / "run", 2, 2, 60_000, **settings)
    try:
        code, said = second.end()
    finally:
        second.kill()
    assert code == 0, said
    assert "continuing the run" in said
    assert json.loads((tmp_path / "run" / "report.json").read_text())["tokens_merged"] >= 60_000
    for name, status in before.items():
        assert any(fragment["companion"] for fragment in status["fragments"])
        log = (tmp_path / "run" / "logs" / f"{name}.log").read_text()
        assert "fragment seeded" not in log, "its first life was seeded, this one was not"
        assert log.count("fragment recovered") == len(status["fragments"])
