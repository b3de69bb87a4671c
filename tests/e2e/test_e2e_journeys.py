"""What a new user types, mistyped: every mistake is answered in at most three lines, with a stable code.

Each is an example of ours with one thing wrong. Nobody sees a stack of ours.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mistakes import EXAMPLES, answer, assert_told
from processes import Script, environment, until
from test_e2e_examples import shard

LOOP = (EXAMPLES / "own_loop.py").read_text()
RESUME = (EXAMPLES / "resume.py").read_text()
JOIN = 'diloco_worker.join(shards, model, run="spirals")'
STEP = "            learner.step(tokens=len(points), loss=loss)"


def with_options(options: str, wait_s: float = 2.0) -> str:
    """The loop, with more options of `join`."""
    assert JOIN in LOOP
    return LOOP.replace(JOIN, f'diloco_worker.join(shards, model, run="spirals", wait_s={wait_s}, {options})')


def before_step(lines: str) -> str:
    """The loop, with something done to the model after the optimizer's step."""
    assert STEP in LOOP
    return LOOP.replace(STEP, f"            {lines}\n{STEP}")


def in_model(line: str) -> str:
    """The loop, with something done to the model before it joins."""
    return LOOP.replace("    optimizer = ", f"    {line}\n    optimizer = ", 1)


MISTAKES: dict[str, tuple[str, str, str]] = {
    # what is wrong -> the script, the shards that it is given, the code that it hears
    "no port": (LOOP, "127.0.0.1", "BAD_CONFIG"),
    "a URL": (LOOP, "http://127.0.0.1:50051", "BAD_CONFIG"),
    "no shards": (LOOP, "", "BAD_CONFIG"),
    "the same shard twice": (LOOP, "SHARD,SHARD", "BAD_CONFIG"),
    "a shard too many": (with_options("", wait_s=60.0), "SHARD,127.0.0.1:9", "BAD_CONFIG"),
    "a port where nobody is": (with_options(""), "127.0.0.1:9", "CANNOT_CONNECT"),
    "another run": (LOOP.replace('"spirals"', '"spiral"'), "SHARD", "WRONG_RUN"),
    "a learner id with a space": (with_options('learner_id="my laptop"'), "SHARD", "BAD_LEARNER_ID"),
    "a folder without certificates": (with_options('tls="/no/such/folder"'), "SHARD", "BAD_CONFIG"),
    "a token that is a path": (with_options('token=__import__("pathlib").Path("/no/token")'), "SHARD", "BAD_CONFIG"),
    "a state of another run": (
        with_options('state={"run": "x", "learner_id": "a", "index": 0, "inner_step": 1, "tokens": 1}'),
        "SHARD", "BAD_CONFIG",
    ),
    "the model as the state": (with_options("state=model.state_dict()"), "SHARD", "BAD_CONFIG"),
    "a name that is no parameter": (with_options('mean_merge=["head"]'), "SHARD", "UNSUPPORTED_MODEL"),
    "an island that is none": (with_options('island="all"'), "SHARD", "UNSUPPORTED_MODEL"),
    "a rule that is none": (with_options('frozen="some"'), "SHARD", "BAD_CONFIG"),
    "residuals nowhere": (with_options('residuals="disk"'), "SHARD", "BAD_CONFIG"),
    "nothing to train": (in_model("model.requires_grad_(False)"), "SHARD", "UNSUPPORTED_MODEL"),
    "a model in float64": (in_model("model.double()"), "SHARD", "UNSUPPORTED_MODEL"),
    "a model on the meta device": (in_model('model.to("meta")'), "SHARD", "UNSUPPORTED_MODEL"),
    "a checkpoint after join": (before_step("model.load_state_dict(model.state_dict())"), "SHARD", "MODEL_CHANGED"),
    "a model moved after join": (before_step("model.double()"), "SHARD", "MODEL_CHANGED"),
    "a step after finish": (before_step("learner.finish()"), "SHARD", "LEARNER_ENDED"),
    "negative tokens": (LOOP.replace("tokens=len(points)", "tokens=-1"), "SHARD", "BAD_CONFIG"),
    "an unknown schedule": (RESUME.replace('"cosine"', '"cos"'), "SHARD", "BAD_CONFIG"),
}  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a shard whose run has no end; its model is that of the loop."""
    folder = tmp_path_factory.mktemp("shard")
    with shard(["diloco-server", "--listen", "127.0.0.1:50051", "--set", "run.id=spirals"], folder) as found:
        yield found


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_three_lines(mistake: str, address: str, as_a_script: Any) -> None:
    script, shards, code = MISTAKES[mistake]

    said = as_a_script(script, shards.replace("SHARD", address))

    assert_told(said, code)


def test_other_errors_keep_their_traceback(address: str, as_a_script: Any) -> None:
    said = as_a_script(before_step("raise ValueError('mine')"), address)
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
    with Script(before_step('print("step", flush=True)'), address, folder=tmp_path) as script:
        until(lambda: script.out, "a step")
        script.send_signal(signal.SIGINT)
        assert script.wait(200) == 130
    (told,) = answer(script.err)
    assert re.fullmatch(r"diloco: interrupted; \S+ has left the run after \d+ steps", told)
