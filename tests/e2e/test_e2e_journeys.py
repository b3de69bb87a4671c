"""What a new user types, mistyped: every mistake is answered in at most three lines, with a stable code.

Each is an example of ours with one thing wrong. What else is called in a wrong way: contract/test_wrong_calls.py.
"""

from __future__ import annotations

import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mistakes import EXAMPLES, answer, as_examples_run, assert_told, before_step, changed
from test_e2e_examples import shard

from processes import Script, environment, until

LOOP = (EXAMPLES / "own_loop.py").read_text()
RESUME = (EXAMPLES / "resume.py").read_text()
JOIN = 'diloco_worker.join(shards, model, run="spirals"'
STATE = 'state=saved.get("learner")'
SAVED_AT = "50"
"""The example saves after so many steps."""


def resumed_with(options: str) -> str:
    """With this in the place of the state that `join` is given."""
    return changed(RESUME, (STATE, options))


def before_joining_again(line: str) -> str:
    return changed(RESUME, (f"    with {JOIN}", f"    {line}\n    with {JOIN}"))


AGAIN = f"{JOIN.replace('model', 'deepcopy(model)')}, state=learner.state_dict()) as again"
MISTAKES: dict[str, tuple[str, str]] = {
    # what is wrong -> the script, the code that it hears
    "a step after finish": (before_step(LOOP, "learner.finish()"), "WRONG_CALL"),
    "resumed: the whole checkpoint as the state": (resumed_with("state=saved"), "BAD_CONFIG"),
    "resumed: a layer frozen meanwhile": (
        before_joining_again("model[0].requires_grad_(False)"), "MANIFEST_MISMATCH",
    ),
    "resumed: the same checkpoint in two processes": (
        changed(RESUME, (f"{JOIN}, {STATE}) as learner", f"{JOIN}, {STATE}) as learner, {AGAIN}"),
                ("import sys", "import sys\nfrom copy import deepcopy")),
        "SUPERSEDED",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shard")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Of a shard whose run has no end; its model is that of both examples."""
    with shard(["diloco-server", "--listen", "127.0.0.1:50051", "--set", "run.id=spirals"], folder) as found:
        yield found


@pytest.fixture(scope="module")
def saved(folder: Path, address: str) -> Path:
    with as_examples_run() as patch:
        patch.setattr(sys, "argv", ["resume.py", address, str(folder / "resume.pt"), SAVED_AT])
        runpy.run_path(str(EXAMPLES / "resume.py"), run_name="__main__")
    return folder / "resume.pt"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_three_lines(mistake, address, saved, as_a_script, tmp_path) -> None:
    script, code = MISTAKES[mistake]
    shutil.copy(saved, tmp_path / "resume.pt")
    assert_told(as_a_script(script, address, str(tmp_path / "resume.pt")), code)


def test_other_errors_keep_their_traceback(address: str, as_a_script: Callable[..., str]) -> None:
    said = as_a_script(before_step(LOOP, "raise ValueError('mine')"), address)
    assert "Traceback (most recent call last):" in said
    assert "ValueError: mine" in said


def test_a_process_ends_with_the_same_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOOP)
    ended = subprocess.run(
        [sys.executable, str(path), "127.0.0.1"], capture_output=True, text=True, timeout=280, env=environment(),
        check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    (told,) = answer(ended.stderr)
    assert told.endswith("[BAD_CONFIG]")


def test_who_waits_for_a_shard_is_told_for_what_and_ctrl_c_is_one_line(tmp_path: Path) -> None:
    with Script(LOOP, "127.0.0.1:9", folder=tmp_path) as script:
        until(lambda: re.search("waiting.*no answer from 127.0.0.1:9", script.err), "it is said")
        script.send_signal(signal.SIGINT)
        assert script.wait(200) == 130
    (told,) = answer(script.err)
    assert told.startswith("diloco: interrupted; ")
    assert told.endswith("had not joined yet: no answer from 127.0.0.1:9")


def test_ctrl_c_while_training_leaves_the_run_in_one_line(address: str, tmp_path: Path) -> None:
    with Script(before_step(LOOP, 'print("step", flush=True)'), address, folder=tmp_path) as script:
        until(lambda: script.out, "a step")
        script.send_signal(signal.SIGINT)
        assert script.wait(200) == 130
    (told,) = answer(script.err)
    assert re.fullmatch(r"diloco: interrupted; \S+ has left the run after \d+ steps", told)
