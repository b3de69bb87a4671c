"""What a training script calls in a wrong way: each is an error of ours, of at most three lines, with a code.

It says what is wrong, and what to do. Where a script does not catch it, these lines are all that a person sees.
"""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import InProcessShard, LoopThread, settings_with
from torch import nn
from training import Training, state_of, tiny_model

import diloco_worker
from diloco_common.errors import DilocoError, one_line
from diloco_worker import ProgressLR, digest_of, init_island

try:
    import accelerate  # noqa: F401

    from diloco_worker.hf import DilocoCallback as OfTransformers
except ImportError:
    OfTransformers = None
try:
    from diloco_worker.lightning import DilocoCallback as OfLightning
except ImportError:
    OfLightning = None

LINES_MAX = 3


class Here:
    """What a wrong call may need: a shard, an empty folder, and a learner that trains, made when it is asked for."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.model = tiny_model()

    @cached_property
    def training(self) -> Training:
        return Training(self.address, "a")

    @property
    def learner(self) -> Any:
        return self.training.learner

    @property
    def finished(self) -> Any:
        self.learner.finish(wait_s=0.0)
        return self.learner

    def join(self, model: Any = None, **options: Any) -> Any:
        """As a script does that is right in all that a row does not give. It must not come to a learner."""
        options.setdefault("wait_s", 10.0)
        options.setdefault("learner_id", "a")
        shards = options.pop("shards", self.address)
        joined = diloco_worker.join(shards, self.model if model is None else model, **options)
        joined.close()
        return joined

    def file(self, name: str = "file") -> Path:
        (self.folder / name).write_text("")
        return self.folder / name

    def close(self) -> None:
        if "training" in vars(self):
            self.training.learner.close()


@pytest.fixture(scope="module")
def shard(loop: LoopThread) -> Iterator[InProcessShard]:
    made = InProcessShard(loop, settings_with(sync={"quorum": 1})).start()
    yield made
    made.stop()


@pytest.fixture
def here(shard: InProcessShard, tmp_path: Path) -> Iterator[Here]:
    made = Here(shard.address, tmp_path)
    yield made
    made.close()


def lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.Tanh())


def frozen_model() -> nn.Module:
    return tiny_model().requires_grad_(requires_grad=False)


def port_in_use(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here.join(http=f"127.0.0.1:{taken.getsockname()[1]}")


def nobody_there(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    here.join(shards=f"127.0.0.1:{port}", wait_s=0.2)


def step_in_two_threads(here: Here) -> None:
    """One waits for something to arrive, and the other steps meanwhile."""
    waits = threading.Event()
    wait = here.learner._inbox.wait

    def waiting(wait_s: float) -> None:
        waits.set()
        wait(wait_s)

    here.learner._inbox.wait = waiting
    thread = threading.Thread(target=here.learner.poll, args=(2.0,))
    thread.start()
    try:
        assert waits.wait(10.0)
        here.training.step()
    finally:
        thread.join()


def inside_a_block(call: Callable[[Any], Any]) -> Callable[[Here], None]:
    def called(here: Here) -> None:
        with here.learner.global_values():
            call(here.learner)

    return called


def follow_wrong_amount(here: Here) -> None:
    here.learner.follow(here.training.optimizer, tokens=lambda: 1.5)
    here.training.optimizer.step()


def batch_without_a_tensor(here: Here) -> None:
    callback = OfLightning(here.address)
    callback.learner = here.learner
    callback.on_train_batch_end(SimpleNamespace(), None, None, ["text"], 0)


HF = pytest.mark.skipif(OfTransformers is None, reason="NOT RUN: transformers or accelerate is not installed")
LIGHTNING = pytest.mark.skipif(OfLightning is None, reason="NOT RUN: lightning is not installed")
Row = tuple[str, Callable[[Here], Any], str, str]
# what is wrong, the call, the code, words of the message
JOIN: list[Row] = [
    ("model: a generator of parameters", lambda h: h.join(h.model.parameters()), "WRONG_CALL", "give the nn.Module"),
    ("model: a state_dict", lambda h: h.join(h.model.state_dict()), "WRONG_CALL", "give the nn.Module"),
    ("model: None", lambda h: diloco_worker.join(h.address, None), "WRONG_CALL", "the model is None"),  # type: ignore[arg-type]
    ("model: lazy", lambda h: h.join(lazy_model()), "UNSUPPORTED_MODEL", "send one batch through"),
    ("model: all frozen", lambda h: h.join(frozen_model()), "UNSUPPORTED_MODEL", "require"),
    ("model: another one", lambda h: [h.training, h.join(tiny_model(width=8))], "MANIFEST_MISMATCH", ""),
    ("model: one with a string as key", lambda h: h.join({1: h.model}), "WRONG_CALL", "dict of models"),
    ("arguments swapped", lambda h: diloco_worker.join(h.model, h.address), "WRONG_CALL", "shards"),  # type: ignore[arg-type]
    ("shards: None", lambda h: h.join(shards=None), "WRONG_CALL", "shards"),
    ("shards: empty", lambda h: h.join(shards=""), "BAD_CONFIG", "no shard addresses"),
    ("shards: a URL", lambda h: h.join(shards="http://ps-0:50051"), "BAD_CONFIG", "http"),
    ("shards: one twice", lambda h: h.join(shards=[h.address] * 2), "BAD_CONFIG", "named twice"),
    ("shards: nobody there", nobody_there, "CANNOT_CONNECT", "no run to join after 0.2 s"),
    ("run: another one", lambda h: h.join(run="other"), "WRONG_RUN", "other"),
    ("run: wrong characters", lambda h: h.join(run="my run"), "WRONG_CALL", "run="),
    ("learner_id: wrong characters", lambda h: h.join(learner_id="my learner"), "BAD_REQUEST", "my learner"),
    ("tls: no such folder", lambda h: h.join(tls="/no/such/folder"), "BAD_CONFIG", "/no/such/folder"),
    ("token: no such file", lambda h: h.join(token=Path("/no/such/token")), "BAD_CONFIG", "/no/such/token"),
    ("shared: fits nothing", lambda h: h.join(shared=["head.*"]), "WRONG_CALL", "shared='head.*' fits nothing"),
    ("shared: not all that trains", lambda h: h.join(shared="0.*"), "UNSUPPORTED_MODEL", "add it to shared="),
    ("private: fits nothing", lambda h: h.join(private=["lora_*"]), "WRONG_CALL", "private='lora_*' fits nothing"),
    ("mean_merge: fits nothing", lambda h: h.join(mean_merge=["head"]), "UNSUPPORTED_MODEL", "names ['head']"),
    ("companions: a state_dict", lambda h: h.join(companions=torch.optim.Adam(h.model.parameters()).state_dict()),
     "BAD_CONFIG", "the optimizer itself"),
    ("state: of another run", lambda h: h.join(state={**state_of("a"), "run": "other"}), "BAD_CONFIG", "run 'other'"),
    ("state: some of it", lambda h: h.join(state={"inner_step": 3}), "BAD_CONFIG",
     "it has no index, learner_id, run, tokens"),
    ("state: of the model", lambda h: h.join(state=h.model.state_dict()), "BAD_CONFIG", "learner.state_dict()"),
    ("http: a port in use", port_in_use, "IN_USE", "127.0.0.1"),
    ("address_file: in no folder", lambda h: h.join(http="127.0.0.1:0", address_file=h.file() / "address"),
     "BAD_CONFIG", "address"),
    ("history: a file", lambda h: h.join(history=h.file()), "BAD_CONFIG", "history="),
    ("wait_s: negative", lambda h: h.join(wait_s=-1), "WRONG_CALL", "wait_s"),
    ("island: a word", lambda h: h.join(island="all"), "UNSUPPORTED_MODEL", "island='all'"),
    ("frozen: another word", lambda h: h.join(frozen="skip"), "WRONG_CALL", "frozen= is 'skip'"),
    ("log: a file", lambda h: h.join(log="train.log"), "WRONG_CALL", "log="),
]  # fmt: skip
STEP: list[Row] = [
    ("neither tokens nor samples", lambda h: h.learner.step(), "BAD_CONFIG", "neither tokens nor samples"),
    ("tokens: a float", lambda h: h.learner.step(tokens=8.0), "BAD_CONFIG", "takes a whole number"),
    ("tokens: a tensor", lambda h: h.learner.step(tokens=torch.tensor(8)), "BAD_CONFIG", "takes a whole number"),
    ("tokens: negative", lambda h: h.learner.step(tokens=-8), "BAD_CONFIG", "0 to 2^40"),
    ("loss: one of each token", lambda h: h.learner.step(8, torch.ones(4)), "WRONG_CALL", "loss"),
    ("loss: what the model returned", lambda h: h.learner.step(8, {"loss": torch.ones(())}), "WRONG_CALL", "loss"),
    ("after finish", lambda h: h.finished.step(8), "WRONG_CALL", "join again"),
    ("in two threads", step_in_two_threads, "WRONG_CALL", "thread"),
    ("inside a block", inside_a_block(lambda learner: learner.step(8)), "WRONG_CALL", "end the block"),
]  # fmt: skip
OTHER_CALLS: list[Row] = [
    ("poll after finish", lambda h: h.finished.poll(), "WRONG_CALL", "join again"),
    ("poll inside a block", inside_a_block(lambda learner: learner.poll()), "WRONG_CALL", "end the block"),
    ("finish inside a block", inside_a_block(lambda learner: learner.finish()), "WRONG_CALL", "end the block"),
    ("a block inside a block", inside_a_block(lambda learner: learner.global_values().__enter__()), "WRONG_CALL",
     "end the block"),
    ("values: none", lambda h: h.learner.values({}).__enter__(), "WRONG_CALL", "there are none"),
    ("values: unknown name", lambda h: h.learner.values({"0.weigth": torch.ones(6, 4)}).__enter__(), "WRONG_CALL",
     "did you mean 0.weight"),
    ("values: another shape", lambda h: h.learner.values({"0.weight": torch.ones(4, 6)}).__enter__(), "WRONG_CALL",
     "of shape (4, 6)"),
    ("restore: of another model", lambda h: h.learner.restore(nn.Linear(2, 2)), "WRONG_CALL", "the model has no"),
    ("follow: without a count", lambda h: h.learner.follow(h.training.optimizer), "BAD_CONFIG", "neither tokens"),
    ("follow: a count that is none", follow_wrong_amount, "BAD_CONFIG", "takes a whole number"),
    ("a deep copy", lambda h: copy.deepcopy(h.learner), "WRONG_CALL", "state_dict()"),
    ("torch.save", lambda h: torch.save({"learner": h.learner}, h.folder / "a.pt"), "WRONG_CALL", "state_dict()"),
    ("digest_of: a state_dict", lambda h: digest_of(h.model.state_dict()), "WRONG_CALL", "give the nn.Module"),  # type: ignore[arg-type]
    ("init_island without torchrun", lambda h: init_island("gloo"), "WRONG_CALL", "torchrun"),
    ("ProgressLR: no optimizer", lambda h: ProgressLR(h.model, h.learner), "WRONG_CALL", "optimizer"),  # type: ignore[arg-type]
    ("ProgressLR: another shape", lambda h: ProgressLR(h.training.optimizer, h.learner, "sine"), "BAD_CONFIG",  # type: ignore[arg-type]
     "'sine'"),
]  # fmt: skip
CALLBACKS: list[Any] = [
    pytest.param(*row, marks=mark, id=row[0])
    for mark, row in [
        (HF, ("Trainer: an island", lambda h: OfTransformers(h.address, island="all"), "BAD_CONFIG", "no island=")),
        (HF, ("Trainer: the best model", lambda h: OfTransformers(h.address).on_train_begin(
            SimpleNamespace(load_best_model_at_end=True), None, None), "BAD_CONFIG", "load_best_model_at_end")),
        (HF, ("Trainer: added too late", lambda h: OfTransformers(h.address).on_step_end(None, None, None),
              "WRONG_CALL", "before train()")),
        (LIGHTNING, ("Lightning: text", batch_without_a_tensor, "BAD_CONFIG", "give tokens= or samples=")),
        (LIGHTNING, ("Lightning: added too late", lambda h: OfLightning(h.address).on_train_end(None, None),
                     "WRONG_CALL", "before fit()")),
    ]
]  # fmt: skip
ALL = [
    *(pytest.param(*row, id=f"join, {row[0]}") for row in JOIN),
    *(pytest.param(*row, id=f"step, {row[0]}") for row in STEP),
    *(pytest.param(*row, id=row[0]) for row in OTHER_CALLS),
    *CALLBACKS,
]


@pytest.mark.parametrize(("wrong", "call", "code", "words"), ALL)
def test_a_wrong_call_is_told_in_at_most_three_lines_with_a_code(
    here: Here, wrong: str, call: Callable[[Here], Any], code: str, words: str
) -> None:
    with pytest.raises(DilocoError) as raised:
        call(here)

    told = one_line(raised.value, "diloco")
    assert told.endswith(f" [{code}]"), told
    assert words in told
    assert len(told.splitlines()) <= LINES_MAX
    assert "Traceback" not in told


@pytest.mark.parametrize("again", ["finish", "leave", "close"])
def test_an_end_may_be_repeated(here: Here, again: str) -> None:
    here.training.step()
    first = here.learner.finish(wait_s=20.0)
    for _ in range(2):
        assert getattr(here.learner, again)() in (first, bool(first), None)
