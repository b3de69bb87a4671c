"""A member of a Ray cluster, without Ray: when its process dies, and when a former one still lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_common.errors import DilocoError
from diloco_common.settings_loader import Given, load, save
from diloco_common.wire.addresses import Endpoints, Role, read_address
from diloco_deploy.cluster.roll_call import read_record
from diloco_deploy.run import ray_up
from diloco_deploy.run.folder import ClusterFolder, Outputs
from diloco_deploy.run.ray_member import MemberReport, OnRay, Plan
from processes import TINY, until

HOST = "127.0.0.1"
Make = Callable[[str], OnRay]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a member, as Ray does on a node; what it started ends with the test."""
    flags = {name: Given(str(value), "test") for name, value in TINY.items()}
    for part in ("run", "logs"):
        (tmp_path / part).mkdir()
    save(load(None, {}, flags=flags).settings, tmp_path / "settings.json")
    made: list[OnRay] = []

    def member(name: str) -> OnRay:
        role: Role = "shard" if name.startswith("shard") else "worker"
        history = tmp_path / "history"
        plan = Plan(name, role, 0, tmp_path, 1, "", has_certificates=False, history=history)
        made.append(OnRay(plan, HOST))
        return made[-1]

    yield member
    for each in made:
        each.stop(0.0)


def known(tmp_path: Path) -> Endpoints | None:
    return read_address(tmp_path / "run/shard-0.json")


def until_up(member: OnRay) -> list[str]:
    """Look after it until it is up. Returns what it said."""
    events: list[str] = []

    def look() -> MemberReport | None:
        found = member.look()
        events.extend(found.events)
        assert found.over is None, events
        return found if found.is_up else None

    until(look, "a member that is up")
    return events


def test_a_member_starts_again_what_dies(make: Make, tmp_path: Path) -> None:
    shard = make("shard-0")
    assert until_up(shard) == [f"shard-0 is up on {HOST}"]
    first = known(tmp_path)
    assert first is not None

    os.kill(first.pid, signal.SIGKILL)
    until(lambda: shard.look().events, "its death")
    until_up(shard)

    second = known(tmp_path)
    assert second is not None
    assert second.pid != first.pid


class Unavailable(Exception):
    """As ActorUnavailableError."""


class FakeRay:
    """Answers looks with what it is given, in order; an exception is raised."""

    exceptions = SimpleNamespace(
        RayActorError=(Unavailable, EOFError), ActorUnavailableError=Unavailable, RayTaskError=OSError
    )

    def __init__(self, *answers: MemberReport | Exception) -> None:
        self.answers = list(answers)

    def wait(self, asked: list[object], **_: object) -> tuple[list[object], list[object]]:
        return asked, []

    def get(self, asked: object) -> MemberReport:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def looks_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Looks after one member until all answers are given."""
    monkeypatch.setattr(ray_up, "EVERY_S", 0.0)
    (tmp_path / "run").mkdir()

    def look_after(name: str, ray: FakeRay) -> None:
        files, interrupts = ClusterFolder(tmp_path, Outputs()), ray_up.Interrupts()
        run = ray_up._RayRun(ray, load(None, {}, flags={}).settings, files, interrupts)
        run._actors[name] = SimpleNamespace(look=SimpleNamespace(remote=object))
        for _ in range(5):
            run._look_after_all()

    return look_after


def state_of(name: str, folder: Path) -> str:
    record = read_record(folder)
    assert record is not None
    return record.members[name].process


def test_a_shard_whose_actor_is_dead_ends_the_run(looks_after: Callable[..., None]) -> None:
    with pytest.raises(DilocoError, match="shard-0: its actor died"):
        looks_after("shard-0", FakeRay(EOFError()))


def test_a_dead_worker_is_lost_and_not_asked_again(looks_after, tmp_path, capsys) -> None:
    looks_after("worker-0", FakeRay(EOFError()))
    assert capsys.readouterr().out.count("its actor died") == 1
    assert state_of("worker-0", tmp_path) == "lost"


def test_what_may_pass_is_looked_at_again(looks_after, tmp_path, capsys) -> None:
    up = MemberReport(HOST, 0, True, None, 0, ())
    looks_after("shard-0", FakeRay(Unavailable(), OSError("stale file"), OSError("stale file"), up, up))
    assert capsys.readouterr().out.count("looking after it failed (stale file)") == 1
    assert state_of("shard-0", tmp_path) == "up"
