"""Where to encode: three ways, during real steps of a model of 1 B parameters, a fragment (a 24th) in each step.

    as it is        on the device, by torch, in slices that fit a CPU's cache; 1 or half a byte per element is copied
    whole chunks    the same on the device, 4 Mi elements at a time: a sixteenth of the launches
    on the host     2 bytes per element are copied to the host, and the kernels in C encode them there

All of them encode snapshot + residual, and keep the encoding error. The bytes are those of the wire format. A way is
worth adopting if a real step gets more than 0.5 % faster, or the use of the host's cores falls by half.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from cost import SIZES, SMALL
from place import Place, adamw, train_step
from report import MEASURED, Row, judged
from torch import Tensor

from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.blocks import BlockCodec
from diloco_common.codec.payload import ChunkWriter
from diloco_common.codec.registry import get_codec

TURN = 8
WORTH_S, WORTH_CORES = 0.005, 0.5


def whole_chunks(values: Tensor, encoding: str, residual: Tensor) -> Payload:
    """The trial: encode x = values + residual, both bfloat16 [n] on a device. residual becomes the encoding error."""
    codec, chunks = get_codec(encoding), ChunkWriter(encoding, values.numel(), chunk_elements(encoding))
    assert isinstance(codec, BlockCodec)
    for bounds in chunks.bounds:
        x = values[bounds].float() + residual[bounds]
        # The last block has fewer elements, so it is padded: zeros change no maximum.
        blocks = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
        scales = blocks.abs().amax(1, keepdim=True)
        scales = scales.div_(torch.full((), codec.code_max, device=x.device)).clamp_(max=codec.scale_max)
        scales.masked_fill_(scales < codec.scale_min, 1.0)
        codes = torch.round(blocks / scales)
        residual[bounds] = (x - (codes * scales).view(-1)[: x.numel()]).to(residual.dtype)
        codes = codes.to(torch.int8).view(-1)[: x.numel()]
        if codec.native_bits == 4:
            pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
            codes = (pairs[:, 0] & 0x0F) | (pairs[:, 1] << 4)
        chunks.next(torch.device("cpu")).copy_(torch.cat([scales.view(-1).view(torch.uint8), codes.view(torch.uint8)]))
        chunks.written(chunks._frame.chunk)
    return chunks.payload()


def chunk_elements(encoding: str) -> int:
    return encode_payload(torch.zeros(1), encoding).header.chunk_elements


def as_it_is(values: Tensor, encoding: str, residual: Tensor) -> Payload:
    return encode_payload(values, encoding, plus=residual, loss=residual)


def on_the_host(values: Tensor, encoding: str, residual: Tensor, host: Tensor) -> Payload:
    """`host` is pinned memory, and `residual` is on the host, too."""
    return as_it_is(host.copy_(values), encoding, residual)


def check_bytes(place: Place) -> list[Row]:
    found = []
    for encoding in ("int8", "int4"):
        drawn = torch.Generator().manual_seed(0)
        values = torch.randn(5_000_001, generator=drawn).bfloat16()
        residual = torch.randn(len(values), generator=drawn).mul_(1e-2).bfloat16()
        theirs, ours = residual.clone(), residual.to(place.device)
        usual = as_it_is(values, encoding, theirs)
        is_equal = whole_chunks(values.to(place.device), encoding, ours) == usual and torch.equal(ours.cpu(), theirs)
        found.append(judged(f"the trial's bytes and loss are the codec's: {encoding}", "equal", is_equal, ""))
    return found


def beside_steps(encoding: str, share: float, place: Place) -> list[Row]:
    size = SIZES["1 B"] if place.is_card else SMALL
    until = time.time() + share * place.left_s()
    model = place.gpt(size.layers, size.width, size.context)
    optimizer, batches = adamw(place, model), place.batches(size.batch, size.context)
    elements = sum(p.numel() for p in model.parameters()) // 24
    values = torch.randn(elements, device=place.device).bfloat16()
    kept, stowed = torch.zeros_like(values), torch.zeros(elements, dtype=torch.bfloat16)
    host = torch.empty_like(values, device="cpu", pin_memory=place.is_card)
    ways: dict[str, Callable[[], Payload] | None] = {
        "none": None,
        "as it is": lambda: as_it_is(values, encoding, kept),
        "whole chunks": lambda: whole_chunks(values, encoding, kept),
        "on the host": lambda: on_the_host(values, encoding, stowed, host),
    }
    step_s: dict[str, list[float]] = {way: [] for way in ways}
    cpu_s: dict[str, list[float]] = {way: [] for way in ways}
    took_s: dict[str, list[float]] = {way: [] for way in ways}

    def timed(way: str, encode: Callable[[], Payload]) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        encode()
        cpu_s[way].append(time.thread_time() - cpu)
        took_s[way].append(time.perf_counter() - began)

    with ThreadPoolExecutor(1, "encodes") as thread:
        is_first = True
        while is_first or time.time() < until:
            for way, encode in ways.items():
                job: Future[Any] | None = None
                place.wait()
                marks = [place.mark()]
                for _ in range(TURN):
                    train_step(place, model, optimizer, next(batches))
                    if encode is not None and (job is None or job.done()):
                        job = thread.submit(timed, way, encode)
                    marks.append(place.mark())
                if job is not None:
                    job.result()
                place.wait()
                if not is_first:
                    step_s[way] += [place.between_s(a, b) for a, b in pairwise(marks)]
            is_first = False
    if not step_s["none"]:
        return [Row(f"{encoding} beside steps", "", MEASURED, "no time for more than the turns to warm up")]
    usual = median(step_s["none"])
    return [
        Row(
            f"{encoding}, {way}", "", MEASURED,
            f"a step {median(step_s[way]) / usual - 1:+.2%} of {1e3 * usual:.1f} ms; {1e3 * median(cpu_s[way]):.1f} ms "
            f"of a core and {1e3 * median(took_s[way]):.1f} ms a fragment of {elements / 1e6:.1f} M"
        )
        for way in ways if way != "none"
    ] + [verdict(encoding, usual, step_s, cpu_s)]  # fmt: skip


def verdict(encoding: str, usual: float, step_s: dict[str, list[float]], cpu_s: dict[str, list[float]]) -> Row:
    now = median(step_s["as it is"]), median(cpu_s["as it is"])
    worth = [
        way for way in ("whole chunks", "on the host")
        if (now[0] - median(step_s[way])) / usual > WORTH_S or median(cpu_s[way]) < WORTH_CORES * now[1]
    ]  # fmt: skip
    return Row(
        f"{encoding}: worth adopting", "0.5 % of a step, or half the cores", MEASURED, ", ".join(worth) or "none"
    )


CASES = {
    "bytes": check_bytes,
    "int8 beside steps": partial(beside_steps, "int8", 0.5),
    "int4 beside steps": partial(beside_steps, "int4", 0.9),
}
