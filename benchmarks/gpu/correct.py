"""Whether a learner on a device holds, contributes and gets what it should. Each case is one row.

A small training script joins two real shards, together with two partners, and uses only the public API.
tests/contract/what_works/script.py says what must be true: a version holds what the script has trained, it is in the
script's model, the next step begins from it, and after `finish` the script's model is what an observer pulls.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from in_process import InProcessShard, LoopThread, settings_with
from place import Place, adamw, train_step
from report import PASS, NotHere, Row
from torch import Tensor, nn
from what_works.script import RATE, Ground, Script, loop, loss_of, small

import diloco_worker
from builders import make_settings
from diloco_common.codec import Payload, decode_payload, encode_payload, encoding_names
from diloco_worker.global_model import pull_global_model
from lockstep import Lockstep

CASES: dict[str, Callable[[Place], list[Row]]] = {}
CODED = 3 * 256 * 1024 + 77
"""Number of elements: several slices and blocks, and an odd rest."""


def case(name: str) -> Callable[[Callable[[Place], str | None]], Callable[[Place], str | None]]:
    """Register a case. It raises if its check fails, and returns the figure for its row."""

    def add(run: Callable[[Place], str | None]) -> Callable[[Place], str | None]:
        CASES[name] = lambda place: [Row(name, result=PASS, figure=run(place) or "")]
        return run

    return add


def script(name: str) -> Callable[[Callable[[Place], Script]], Callable[[Place], Script]]:
    """Register a case that is just a training script."""

    def add(make: Callable[[Place], Script]) -> Callable[[Place], Script]:
        case(name)(lambda place: trains(make(place)))
        return make

    return add


def trains(made: Script) -> None:
    with ground() as here:
        here.trains(made)


@contextmanager
def ground(**settings: Any) -> Iterator[Ground]:
    """Two shards that serve on loopback, in a thread of this process. `settings` are those of the section `sync`."""
    thread, started = LoopThread(), list[InProcessShard]()

    def start(**sync: int) -> str:
        exact = {"push": "float32", "pull": "float32", "fragments": 2, **settings, **sync}
        outer = {"average": 0.9}  # only those who ask for the average see it
        shards = [settings_with(sync=exact, outer=outer, shard={"index": i, "count": 2}) for i in range(2)]
        started.extend(InProcessShard(thread, settings).start() for settings in shards)
        return ",".join(shard.address for shard in started)

    with tempfile.TemporaryDirectory() as folder:
        yield Ground(start, Path(folder))
    for shard in started:
        shard.stop_soon()
    thread.close()


# ------------------------------------------------------------ bits


def check_bytes(encoding: str, place: Place) -> None:
    """Encode and decode on the CPU and on the device, with error feedback, and compare all results."""
    drawn = torch.Generator().manual_seed(place.seed)
    values = torch.randn(CODED, generator=drawn) * torch.rand(CODED, generator=drawn).mul_(-30).exp_()
    values[:300], values[300:600] = 0.0, values[300:600] * 1e-38
    plus = torch.randn(CODED, generator=drawn).mul_(1e-2).bfloat16()

    def on(device: torch.device) -> tuple[Payload, Tensor, Tensor]:
        loss = torch.empty(CODED, dtype=torch.bfloat16, device=device)
        payload = encode_payload(values.bfloat16().to(device), encoding, plus=plus.to(device), loss=loss)
        out = torch.empty(CODED, device=device)
        decode_payload(payload, out)
        return payload, loss.cpu(), out.cpu()

    ours, theirs = on(torch.device("cpu")), on(place.device)
    assert ours[0] == theirs[0], "other bytes"
    assert torch.equal(ours[1].view(torch.int16), theirs[1].view(torch.int16)), "another loss"
    assert torch.equal(ours[2].view(torch.int32), theirs[2].view(torch.int32)), "other decoded values"


for _encoding in encoding_names():
    case(f"equal values are equal bytes: {_encoding}")(partial(check_bytes, _encoding))


def check_same_run(dtype: torch.dtype, place: Place) -> None:
    """Carry, snapshots, residuals: two learners train on the same numbers on CPU and device, and get the same bits."""

    def run(device: torch.device) -> list[Tensor]:
        coded = {"push": "int8", "pull": "bfloat16", "fragments": 2, "sync_every": 2}
        cluster, drawn = Lockstep(make_settings(sync=coded), num_shards=2), torch.Generator().manual_seed(place.seed)
        models = {name: small().to(device, dtype) for name in "ab"}
        for name, model in models.items():
            cluster.join(name, model)
        for _ in range(12):
            for name, model in models.items():
                with torch.no_grad():
                    for theta in model.parameters():
                        theta.add_(torch.randn(theta.shape, generator=drawn).mul_(1e-2).to(device, dtype))
                cluster.stepped(name, tokens=8)
            cluster.exchange()
        fragments = [f for one in cluster.learners.values() for f in one.core.fragments.values()]
        assert min(f.version for f in fragments) >= 2, "too few versions"
        residuals = [r for f in fragments if (r := f.tensors._residual) is not None]
        assert residuals, "nothing was fed back"
        return [t.detach().cpu().float() for model in models.values() for t in model.parameters()] + [
            r.cpu().float() for r in residuals
        ]

    for one, other in zip(run(torch.device("cpu")), run(place.device), strict=True):
        assert torch.equal(one, other), f"off by {float((one - other).abs().max()):g}"


for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    _said = str(_dtype).removeprefix("torch.")
    case(f"carry and error feedback end in the same bits: {_said}")(partial(check_same_run, _dtype))


# ------------------------------------------------------------ training scripts

WORK: dict[str, tuple[str, ...]] = {
    # A module of what_works -> lines of docs/what-works.md.
    "precision": (
        "parameters in float32", "parameters in bfloat16", "parameters in float16", "autocast",
        "GradScaler, with skipped steps",
    ),
    "optimizers": (
        "AdamW", "AdamW(fused=True)", "AdamW(foreach=True)", "Muon for matrices, AdamW for the rest",
        "gradient accumulation and clipping", "float32 masters beside bfloat16 weights, with masters=",
    ),
    "layouts": ("channels_last",),
    "models": ("BatchNorm and others with running statistics",),
    "values": (
        "an average swapped in to evaluate, and back (p.data.copy_)",
        "learner.values(ema), learner.global_values() and learner.global_values(average=True)",
    ),
    "loaders": ("DataLoader with spawned workers",),
    "wrappers": ("DistributedDataParallel with island=", "fully_shard (FSDP2) with island="),
}  # fmt: skip


def of_what_works(module: str, line: str, place: Place) -> None:
    try:
        cases = import_module(f"what_works.{module}").CASES
    except ImportError as error:
        raise NotHere(f"torch {torch.__version__}: {error}") from None
    if line.startswith("Muon") and not hasattr(torch.optim, "Muon"):
        raise NotHere(f"torch {torch.__version__} has none")
    with ground() as here:
        cases[line](here)


for _module, _lines in WORK.items():
    for _line in _lines:
        case(_line)(partial(of_what_works, _module, _line))


def stepping(model: nn.Module, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Callable[[], Tensor]:
    return loop(model, make(model.parameters(), lr=RATE))


def compiled(mode: str, place: Place) -> Script:
    place.need_card("a card: on a CPU, compiling takes longer than the whole rehearsal")
    model = small()
    fast = torch.compile(model, mode=mode)

    def loss() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return loss_of(fast)

    return Script(model, loop(model, torch.optim.AdamW(model.parameters(), lr=RATE), loss))


def captured(place: Place, model: nn.Module, mode: str) -> Callable[[], Tensor]:
    """Capture a whole training step as one CUDA graph, with capturable=True. Returns a function that replays it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, capturable=True)
    side = place.module.Stream()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    side.wait_stream(place.module.current_stream())
    with place.module.stream(side):
        for _ in range(3):
            step()
    place.module.current_stream().wait_stream(side)
    graph = place.module.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with place.module.graph(graph, capture_error_mode=mode):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss.detach().clone()

    return replay


def need_graphs(place: Place) -> None:
    place.need_card()
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise NotHere("a graph is launched as a whole")


@script("a whole step as one CUDA graph, captured before join")
def graph_before(place: Place) -> Script:
    need_graphs(place)
    model = small()
    return Script(model, captured(place, model, "global"))


@script('a whole step as one CUDA graph, captured after join with "thread_local"')
def graph_after(place: Place) -> Script:
    need_graphs(place)
    model, made = small(), list[Callable[[], Tensor]]()
    return Script(model, lambda: made[0](), joined=lambda learner: made.append(captured(place, model, "thread_local")))


@script("an 8-bit optimizer (bitsandbytes or torchao)")
def eight_bits(place: Place) -> Script:
    for package, name in (("bitsandbytes.optim", "AdamW8bit"), ("torchao.optim", "AdamW8bit")):
        try:
            make = getattr(__import__(package, fromlist=[name]), name)
        except ImportError:
            continue
        model = small()
        return Script(model, stepping(model, make))
    raise NotHere("neither is installed")


@script("a step on a side stream of the script's own")
def side_stream(place: Place) -> Script:
    place.need_card()
    model, stream = small(), place.module.Stream()
    usual = stepping(model)

    def step() -> Tensor:
        stream.wait_stream(place.module.current_stream())
        with place.module.stream(stream):
            loss = usual()
        place.module.current_stream().wait_stream(stream)
        return loss

    return Script(model, step)


# ------------------------------------------------------------ real processes, default encodings


def tiny_gpt(place: Place) -> Any:
    return place.gpt(layers=2, width=64, context=32)


def first_life(device: str, pipe: Any, stepped: Any) -> None:
    """The first life of the learner that is killed, in a process of its own."""
    place = Place.of(device, 1, 0.0)
    model = tiny_gpt(place)
    batches, optimizer = place.batches(4, 32, seed=1), adamw(place, model)
    with diloco_worker.join(pipe.recv(), model, learner_id="killed", wait_s=60.0, log=None) as learner:
        while True:
            learns(place, learner, model, optimizer, next(batches))
            stepped.value += 1


def learns(place: Place, learner: Any, model: Any, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
    train_step(place, model, optimizer, rows)
    learner.step(tokens=128)
    learner.poll(0.005)


@case("a learner is killed and comes back; pull loads strictly and evaluates alike")
def killed(place: Place) -> str:
    spawn = multiprocessing.get_context("spawn")
    stepped, (ours, theirs) = spawn.Value("i", 0), spawn.Pipe()
    first = spawn.Process(target=first_life, args=(str(place.device), theirs, stepped), daemon=True)
    first.start()
    with ground(push="int8", pull="bfloat16", sync_every=4, fragments=4, quorum=1) as here:
        addresses = here.shards.split(",")
        join = partial(diloco_worker.join, addresses, wait_s=30.0, log=None)
        ours.send(addresses)
        model, again, batches = tiny_gpt(place), tiny_gpt(place), place.batches(4, 32)
        optimizers = [adamw(place, model), adamw(place, again)]
        with join(model, learner_id="stays") as stays:
            while stepped.value < 8:
                assert first.is_alive(), "the first life ended by itself"
                learns(place, stays, model, optimizers[0], next(batches))
            first.kill()
            first.join()
            with join(again, learner_id="killed") as second:
                assert second.core is not None
                until = time.monotonic() + 15.0
                while second.core.contributions["merged"] < 4 and time.monotonic() < until:
                    learns(place, stays, model, optimizers[0], next(batches))
                    learns(place, second, again, optimizers[1], next(batches))
                merged = second.core.contributions["merged"]
            assert stays.finish()
        assert merged >= 4, f"only {merged} contributions of the second life were merged"
        fresh, rows = tiny_gpt(place), next(batches)
        fresh.load_state_dict(dict(pull_global_model(addresses).tensors), strict=True)
        with torch.no_grad():
            losses = [float(m.loss(rows[:, :-1], rows[:, 1:])) for m in (model, fresh)]
    assert abs(losses[0] - losses[1]) < 1e-2 * losses[0], f"losses {losses}"
    return f"losses {losses[0]:.4f} and {losses[1]:.4f}"


# These come last, as compiling takes longest.
script("torch.compile(mode='default')")(partial(compiled, "default"))
script("torch.compile(mode='reduce-overhead')")(partial(compiled, "reduce-overhead"))
