"""Children of a learner's process: gRPC leaves them alone, and none of them is the learner."""

from __future__ import annotations

import ast
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from diloco_common.errors import WrongCall
from diloco_worker.shell import process as children

ROOTS = ("common", "server", "worker", "deploy", "simulator")


def test_no_package_imports_grpc_before_the_variable_is_set(repository: Path) -> None:
    """The first import of ours in a package that uses grpc anywhere is `diloco_common`."""
    users = set()
    for root in ROOTS:
        for path in (repository / root).glob("*/**/*.py"):
            tops = {name.partition(".")[0] for node in ast.walk(ast.parse(path.read_text())) for name in _names(node)}
            if tops & {"grpc", "grpc_health", "diloco_protos"}:
                users.add(path.relative_to(repository).parts[:2])
    assert len(users) >= 3
    for package in users:
        imports = [n for n in ast.parse(repository.joinpath(*package, "__init__.py").read_text()).body if _is_ours(n)]
        assert list(_names(imports[0])) == ["diloco_common"], package


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(children, "_first_join", None)
    monkeypatch.delenv(children.MARK, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("mark", "is_refused"),
    [
        ("PARENT r/a", True),
        ("GRANDPARENT r/b r/a", True),
        ("PARENT r/b", False),
        ("PARENT other/a", False),
        ("SELF r/a", False),
    ],
)
def test_a_child_does_not_join_in_the_place_of_its_parent(
    mark: str, is_refused: bool, alone: pytest.MonkeyPatch
) -> None:
    grandparent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    if grandparent == "0" and mark.startswith("GRANDPARENT"):
        pytest.skip("the parent of these tests is the first process")
    pids = {"SELF": os.getpid(), "GRANDPARENT": grandparent, "PARENT": os.getppid()}
    pid, names = mark.split(" ", 1)
    alone.setenv(children.MARK, f"{pids.get(pid, pid)} {names}")
    with pytest.raises(WrongCall, match="is a already") if is_refused else nullcontext():
        children.check_may_join("r", "a")


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom(module=str(module)):
            yield module


def _is_ours(node: ast.stmt) -> bool:
    return any(name.startswith("diloco_") for name in _names(node))


def test_a_spawned_child_that_runs_the_script_again_is_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(WrongCall, match='if __name__ == "__main__":'):
        children.check_may_join("r", "a")
