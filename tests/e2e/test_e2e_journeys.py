"""What a new user types, mistyped: every mistake is answered in at most three lines, with a stable code.

Each is an example of ours with one thing wrong. What else is called in a wrong way: contract/test_wrong_calls.py.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mistakes import EXAMPLES, answer, assert_told, before_step
from test_e2e_examples import shard

from processes import Script, run_module, until

LOOP = (EXAMPLES / "own_loop.py").read_text()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a shard whose run has no end; its model is that of the example."""
    folder = tmp_path_factory.mktemp("shard")
    with shard(["diloco-server", "--listen", "127.0.0.1:50051", "--set", "run.id=spirals"], folder) as found:
        yield found


def test_a_mistake_is_answered_in_three_lines(address: str, as_a_script: Callable[..., str]) -> None:
    assert_told(as_a_script(before_step(LOOP, "learner.finish()"), address), "WRONG_CALL")


def test_other_errors_keep_their_traceback(address: str, as_a_script: Callable[..., str]) -> None:
    said = as_a_script(before_step(LOOP, "raise ValueError('mine')"), address)
    assert "Traceback (most recent call last):" in said
    assert "ValueError: mine" in said


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


@pytest.mark.parametrize("program", [["diloco_deploy", "up"], ["diloco_server"], ["diloco_demo"]], ids=lambda p: p[0])
def test_a_process_ends_with_one_line_and_its_exit_code(program: list[str]) -> None:
    ended = run_module(*program, "--set=sync.quorm=2", own_interpreter=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "sync.quorm" in line
    assert "did you mean sync.quorum" in line
