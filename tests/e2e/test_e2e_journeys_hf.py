"""The examples of Hugging Face, mistyped: every mistake is answered in at most three lines, with a stable code.

As in test_e2e_journeys.py.
"""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator

import pytest
from mistakes import EXAMPLES, assert_told, changed
from test_e2e_examples import shard

import diloco_worker

transformers = pytest.importorskip("transformers", reason="NOT RUN: transformers is not installed")
pytest.importorskip("accelerate", reason="NOT RUN: accelerate is not installed")
peft = pytest.importorskip("peft", reason="NOT RUN: peft is not installed")

TEXT = ("Path(__file__).parent.parent.glob", f"Path({str(EXAMPLES)!r}).parent.glob")
TRAINER = changed((EXAMPLES / "hf_trainer.py").read_text(), TEXT)
LORA = (EXAMPLES / "lora.py").read_text()
MADE = "    callback = DilocoCallback("
TARGETS = '["c_attn", "c_fc"]'


MISTAKES: dict[str, tuple[str, str, str]] = {
    # what is wrong -> the script, the shard that it is given, the code that it hears
    "trainer: another run": (changed(TRAINER, ('"trainer"', '"lora"')), "TRAINER", "WRONG_RUN"),
    "trainer: a model in float64": (
        changed(TRAINER, (MADE, f"    model.double()\n{MADE}")), "TRAINER", "UNSUPPORTED_MODEL",
    ),
    "lora: another base": (changed(LORA, ("manual_seed(0)", "manual_seed(1)")), "LORA", "FROZEN_MISMATCH"),
    "lora: another rank of the adapter": (changed(LORA, ("r=4", "r=8")), "LORA", "MANIFEST_MISMATCH"),
    "lora: an adapter that is frozen": (
        changed(LORA, ("    with diloco", "    model.requires_grad_(False)\n    with diloco")), "LORA",
        "UNSUPPORTED_MODEL",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a shard for each example. At that of LoRA there is a learner, with the right base and adapter."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "trainer").mkdir()
    (folder / "lora").mkdir()
    serve = ["diloco-server", "--listen", "127.0.0.1:50051", "--set"]
    with (
        shard([*serve, "run.id=trainer"], folder / "trainer") as trainer,
        shard([*serve, "run.id=lora"], folder / "lora") as lora,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.syspath_prepend(EXAMPLES)
        example = runpy.run_path(str(EXAMPLES / "lora.py"))
        config = peft.LoraConfig(target_modules=ast.literal_eval(TARGETS), r=4, fan_in_fan_out=True)
        with diloco_worker.join(
            lora, peft.get_peft_model(example["base"](), config), learner_id="first", run="lora", wait_s=60.0
        ):
            yield {"TRAINER": trainer, "LORA": lora}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_hugging_face_is_answered_in_three_lines(mistake, addresses, as_a_script) -> None:
    script, shard, code = MISTAKES[mistake]
    assert_told(as_a_script(script, addresses[shard], "out"), code)
