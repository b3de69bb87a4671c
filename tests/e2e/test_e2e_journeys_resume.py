"""The example that resumes, mistyped: every mistake is answered in at most three lines, with a stable code.

As in test_e2e_journeys.py. Each goes on from a checkpoint that the example itself has left.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mistakes import EXAMPLES, as_examples_run, assert_told, changed
from test_e2e_examples import shard

RESUME = (EXAMPLES / "resume.py").read_text()
STATE = 'state=saved.get("learner")'
JOIN = f'diloco_worker.join(shards, model, run="spirals", {STATE})'
LOAD = '        model.load_state_dict(saved["model"])\n'
STEPS = "50"
"""The example saves then."""


def given(options: str) -> str:
    """With this in the place of the state that `join` is given."""
    return changed(RESUME, (STATE, options))


def before_join(line: str) -> str:
    return changed(RESUME, (f"    with {JOIN}", f"    {line}\n    with {JOIN}"))


def in_loop(line: str, before: str) -> str:
    return changed(RESUME, (f"            {before}", f"            {line}\n            {before}"))


AGAIN = 'diloco_worker.join(shards, deepcopy(model), run="spirals", state=learner.state_dict()) as again'
MISTAKES: dict[str, tuple[str, str, str]] = {
    # what is wrong -> the script, the shards that it is given, the code that it hears
    "a URL": (RESUME, "http://127.0.0.1:50051", "BAD_CONFIG"),
    "a port where nobody is": (given(f"{STATE}, wait_s=1.0"), "127.0.0.1:9", "CANNOT_CONNECT"),
    "the run renamed": (changed(RESUME, ('run="spirals"', 'run="spirals-2"')), "SHARD", "BAD_CONFIG"),
    "the whole checkpoint as the state": (given("state=saved"), "SHARD", "BAD_CONFIG"),
    "the state of the optimizer": (given('state=saved["optimizer"]'), "SHARD", "BAD_CONFIG"),
    "the path of the checkpoint": (given("state=checkpoint"), "SHARD", "BAD_CONFIG"),
    "the state as JSON": (given('state=__import__("json").dumps(saved["learner"])'), "SHARD", "BAD_CONFIG"),
    "a count typed by hand": (given('state=saved["learner"] | {"inner_step": "50"}'), "SHARD", "BAD_CONFIG"),
    "loaded after join": (
        changed(RESUME, (LOAD, ""), ("        generator = ", '        model.load_state_dict(saved["model"])\n'
                                                             "        generator = ")),
        "SHARD", "MODEL_CHANGED",
    ),
    "back to the checkpoint while it trains": (
        in_loop('model.load_state_dict(saved["model"])', "learner.step("), "SHARD", "MODEL_CHANGED",
    ),
    "a layer more than before": (before_join("model.append(nn.Linear(2, 2))"), "SHARD", "MANIFEST_MISMATCH"),
    "a layer frozen meanwhile": (before_join("model[0].requires_grad_(False)"), "SHARD", "MANIFEST_MISMATCH"),
    "a warm-up in steps": (changed(RESUME, ('"cosine"', '"cosine", warmup=100')), "SHARD", "BAD_CONFIG"),
    "finish, so that the checkpoint is whole": (
        in_loop("learner.finish()", "if learner.inner_step % 50 == 0:"), "SHARD", "LEARNER_ENDED",
    ),
    "the same checkpoint in two processes": (
        changed(RESUME, (f"{JOIN} as learner", f"{JOIN} as learner, {AGAIN}"), ("import sys", "import sys\n"
                                                                            "from copy import deepcopy")),
        "SHARD", "SUPERSEDED",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a shard whose run has no end, and the checkpoint of a learner that has been there."""
    folder = tmp_path_factory.mktemp("left")
    with (
        shard(["diloco-server", "--listen", "127.0.0.1:50051", "--set", "run.id=spirals"], folder) as address,
        as_examples_run() as patch,
    ):
        patch.setattr(sys, "argv", ["resume.py", address, str(folder / "resume.pt"), STEPS])
        runpy.run_path(str(EXAMPLES / "resume.py"), run_name="__main__")
        yield address, folder / "resume.pt"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_when_resuming_is_answered_in_three_lines(
    mistake: str, left: tuple[str, Path], as_a_script: Callable[..., str], tmp_path: Path
) -> None:
    script, shards, code = MISTAKES[mistake]
    address, saved = left
    shutil.copy(saved, tmp_path / "resume.pt")

    said = as_a_script(script, shards.replace("SHARD", address), str(tmp_path / "resume.pt"))

    assert_told(said, code)
