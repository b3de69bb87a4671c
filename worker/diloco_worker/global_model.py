"""The global model: read without joining, every fragment from every shard in float32, and written as one file.

The file has the user's own parameter names. Plain torch and safetensors can load it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diloco_common.codec import decode_payload
from diloco_common.errors import (
    Busy,
    CannotConnect,
    ConfigError,
    DataError,
    HandshakeFailed,
    ManifestMismatch,
    NotSeeded,
    Refusal,
)
from diloco_common.ports import Transport, Unavailable
from diloco_common.trust.credentials import Credentials
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import AGAIN_S, LONG_S, call_s
from diloco_common.wire.follower import read_version
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.manifest import Fragment, Manifest, Tie, cut
from diloco_common.wire.messages import (
    AVERAGE,
    PROTOCOL,
    Committed,
    FollowRequest,
    FrozenTensor,
    JoinAnswer,
    JoinRequest,
    PullRequest,
    Pulse,
    Role,
    Stop,
)
from diloco_worker.core import names


@dataclass(frozen=True)
class GlobalModel:
    """The latest announced version of every fragment. Each is complete, but their ages may differ."""

    tensors: dict[str, Tensor]
    """Parameter or buffer name -> values: parameters as float32, buffers in their own dtype."""
    buffers: frozenset[str]
    versions: dict[int, int]
    tokens_merged: int
    keys: dict[str, str]
    """The model's state_dict: key -> name in `tensors`, or "" for entries that the run does not hold (frozen, private,
    extra state). Where no learner has reported keys, the names in `tensors`."""
    frozen: tuple[FrozenTensor, ...] = ()
    """Tensors that learners keep frozen, as far as the shards know."""
    is_final: bool = False
    """The run has merged its budget. Buffers may still change until the learners have left."""
    version: int = 0
    """The version that every fragment of parameters has reached. Buffers may be due less often."""

    def load_into(self, module: nn.Module) -> None:
        """Load all values. The module keeps what the run does not hold (frozen, private). Raises ManifestMismatch."""
        there, keys = names.saved(module), self.keys
        wrong = there.keys() ^ keys.keys()
        found = {key: self.tensors[name] for key, name in keys.items() if name and key in there}
        wrong |= {key for key, values in found.items() if not _fits(there[key], values)}
        if wrong:
            raise ManifestMismatch(
                f"{min(wrong)} of this module differs from the model of the run: give the module that learners join"
            )
        with torch.no_grad():
            for key, values in found.items():
                cast(Tensor, there[key]).copy_(values)


def versions(
    shards: Sequence[str],
    module: nn.Module | None = None,
    *,
    every: int = 1,
    run: str = "local",
    tls: Path | None = None,
    bearer_token: str | Path | None = None,
    wait_s: float = 60.0,
) -> Iterator[GlobalModel]:
    """The global model now, and again whenever every fragment has `every` further versions, until the run is over and
    its learners have left. For evaluation, sampling and serving: versions in between are skipped.

    Each is also loaded into `module`, if given, with its buffers (`GlobalModel.load_into`). Waits `wait_s` seconds
    for a shard that is away. Other arguments and errors are those of `pull_global_model`.
    """
    found: GlobalModel | None = None
    is_over = False
    with _in_thread(shards, tls, bearer_token) as (transports, call):
        while not is_over:
            try:
                newer, is_over = call(_look(transports, Identity(run), wait_s, found, every))
            except CannotConnect:
                if found is None or not found.is_final:
                    raise
                return  # the shards have ended after the run
            if newer is not None:
                if module is not None:
                    newer.load_into(module)
                yield newer
                found = replace(newer, tensors={})


def pull_global_model(
    shards: Sequence[str],
    *,
    run: str = "local",
    tls: Path | None = None,
    bearer_token: str | Path | None = None,
    wait_s: float = 5.0,
    average: bool = False,
) -> GlobalModel:
    """Pull the global model. `tls` and `bearer_token` are as in `join`; any learner or observer may do this.

    `average`: for parameters, the average of the versions instead of the latest one. Raises NoAverage if the run keeps
    none.

    Raises CannotConnect if a shard does not answer within `wait_s` seconds, ConfigError or ManifestMismatch if the
    shards do not form one run, HandshakeFailed if TLS fails, and the Refusal of a shard.
    """
    with _in_thread(shards, tls, bearer_token) as (transports, call):
        found, _ = call(_pull_all(transports, Identity(run), wait_s, average=average))
    assert found is not None, "any is newer than none"
    return found


def buffers_of(manifest: Manifest) -> frozenset[str]:
    return frozenset(spec.name for spec in manifest.exported if spec.kind == "buffer")


def keys_of(tensors: Collection[str], ties: Iterable[Tie]) -> dict[str, str]:
    ties = list(ties)
    absent = {tie.of for tie in ties if not tie.name}
    told = {tie.name: tie.of for tie in ties if tie.name and (tie.of in tensors or not tie.of)}
    return {name: name for name in tensors if name not in absent} | told


def _fits(there: object, values: Tensor) -> bool:
    return isinstance(there, Tensor) and there.shape == values.shape


Found: TypeAlias = tuple[GlobalModel | None, bool]
"""The model, or None if not every fragment has enough further versions; and whether nothing more can come."""


@contextmanager
def _in_thread(
    shards: Sequence[str], tls: Path | None, bearer_token: str | Path | None
) -> Iterator[tuple[dict[str, Transport], Callable[[Coroutine[Any, Any, Found]], Found]]]:
    """Connections, and a function that runs a call on them in a thread: a notebook runs an event loop in its own."""
    credentials = Credentials(tls, bearer_token)
    transports: dict[str, Transport] = {
        address: GrpcTransport(address, credentials, waits_for_shard=True) for address in shards
    }

    async def close() -> None:
        for transport in transports.values():
            await transport.close(0.0)

    def call(pulled: Coroutine[Any, Any, Found]) -> Found:
        future = thread.submit(runner.run, pulled)
        try:
            return future.result()
        except KeyboardInterrupt:
            loop = runner.get_loop()
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
            raise

    runner = asyncio.Runner()
    with ThreadPoolExecutor(1, "diloco-pull") as thread:
        try:
            yield transports, call
        finally:
            thread.submit(runner.run, close()).result()
            thread.submit(runner.close).result()


async def _look(
    transports: Mapping[str, Transport], observer: Identity, wait_s: float, than: GlobalModel | None, every: int
) -> Found:
    """`_pull_all`, repeated for `wait_s` while a shard is away or not seeded."""
    now = asyncio.get_running_loop().time
    until = now() + wait_s
    while True:
        try:
            return await _pull_all(transports, observer, wait_s, than, every)
        except (CannotConnect, NotSeeded):
            if now() > until or (than is not None and than.is_final):
                raise
            await asyncio.sleep(AGAIN_S)


async def _pull_all(
    transports: Mapping[str, Transport], observer: Identity, wait_s: float, than: GlobalModel | None = None,
    every: int = 1, *, average: bool = False,
) -> Found:  # fmt: skip
    answers: dict[str, JoinAnswer] = {}
    for address, transport in transports.items():
        request = JoinRequest(PROTOCOL, "", observe=True)
        try:
            answers[address] = await transport.join(observer, request, wait_s)
        except HandshakeFailed:
            raise
        except Unavailable as error:
            raise _unreachable(address, error) from None
    manifest = _manifest(answers)
    pulses = [answer.pulse for answer in answers.values()]
    is_final = all(0 < pulse.tokens_budget <= pulse.tokens_merged for pulse in pulses)
    is_over = is_final and not any(pulse.learners_alive for pulse in pulses)
    told = {one.fragment_id: one.version for answer in answers.values() for one in answer.fragments}
    of_model = {fragment.fragment_id for fragment in manifest.exported_fragments if fragment.traits.is_of_model}
    if than is not None:
        now = {fragment: told[fragment] for fragment in than.versions}
        at_the_end = than.versions != now or not than.is_final  # buffers come last
        if not (at_the_end if is_final else _are_further(now, than, of_model, every)):
            if not is_over:
                await _news(transports, observer, than, of_model, every)
            return None, is_over
    tensors = empty_tensors(manifest)
    versions: dict[int, int] = {}
    for address, answer in answers.items():
        for fragment in manifest.exported_fragments:
            if fragment.shard_index != answer.shard_index:
                continue
            encoding = AVERAGE if average and fragment.traits.is_of_model else "float32"
            try:
                version = await _pull(transports[address], fragment, observer, tensors, encoding)
            except Unavailable as error:
                raise _unreachable(address, error) from None
            versions[fragment.fragment_id] = version
    tokens_merged = max(answer.pulse.tokens_merged for answer in answers.values())
    ties = max((answer.ties for answer in answers.values()), key=len)  # a new shard has heard of none
    first = max(answers.values(), key=lambda answer: len(answer.frozen))
    keys = keys_of(tensors, ties)
    version = min(versions[fragment] for fragment in of_model)
    return (
        GlobalModel(tensors, buffers_of(manifest), versions, tokens_merged, keys, first.frozen, is_final, version),
        is_over,
    )


async def _news(
    transports: Mapping[str, Transport], observer: Identity, than: GlobalModel, of_model: Collection[int], every: int
) -> None:
    """Wait until `every` more versions are announced, or the run ends, or a stream breaks. It may also end earlier."""
    told, training = dict(than.versions), set(transports.values())  # shards that still have learners

    async def follow(transport: Transport) -> None:
        stream = transport.follow(observer, FollowRequest(Role.OBSERVER))
        try:
            while (directive := await stream.hear()) is not None:
                match directive:
                    case Committed() if directive.fragment_id in told:
                        told[directive.fragment_id] = directive.version
                        if _are_further(told, than, of_model, every) or (than.is_final and told != than.versions):
                            return
                    case Pulse(learners_alive=0) if than.is_final:
                        training.discard(transport)
                        if not training:
                            return
                    case Stop() if not than.is_final:
                        return
        except (Refusal, Unavailable):
            pass
        finally:
            stream.cancel()

    following = [asyncio.create_task(follow(transport)) for transport in transports.values()]
    await asyncio.wait(following, timeout=LONG_S, return_when=asyncio.FIRST_COMPLETED)
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    await asyncio.sleep(AGAIN_S)


def _are_further(now: Mapping[int, int], than: GlobalModel, of_model: Collection[int], every: int) -> bool:
    """Whether there are `every` further versions. A restored shard may go back: its versions differ, too."""
    least = min(now[fragment] - than.versions[fragment] for fragment in of_model)
    return least >= every or least < 0


async def _pull(
    transport: Transport, fragment: Fragment, observer: Identity, tensors: dict[str, Tensor], encoding: str
) -> int:
    """Copy the fragment's latest version into the tensors. Returns its number."""
    request = PullRequest(fragment.fragment_id, (encoding,))
    now = asyncio.get_running_loop().time
    timeout_s = call_s(4 * fragment.num_elements)
    until = now() + max(timeout_s, 2 * LONG_S)  # only a few may pull in an encoding of their own at once
    while True:
        parts = transport.pull(observer, request, timeout_s)
        try:
            header, payload = await read_version(parts, request, fragment.num_elements)
            break
        except Busy:
            if now() > until:
                raise
            await asyncio.sleep(AGAIN_S)
    assert payload is not None, "an observer has no version yet"
    values = torch.empty(fragment.num_elements)
    decode_payload(payload, values)
    lay_out(values, fragment, tensors)
    return header.version


def _manifest(answers: Mapping[str, JoinAnswer]) -> Manifest:
    first_address, first = next(iter(answers.items()))
    found = sorted(answer.shard_index for answer in answers.values())
    if found != list(range(first.num_shards)):
        raise ConfigError(
            f"the run has {first.num_shards} shards, but the given addresses are those of {found}; give all of them"
        )
    manifest = cut(first.tensors, first.num_fragments, first.num_shards)
    for address, answer in answers.items():
        if answer.manifest_digest != manifest.digest:
            raise ManifestMismatch(
                f"{address} and {first_address} hold different models; give the addresses of one run"
            )
    return manifest


def _unreachable(address: str, error: Unavailable) -> CannotConnect:
    return CannotConnect(f"no shard answers at {address} ({error})")


def empty_tensors(manifest: Manifest, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Empty tensors for all values in a file of the model: parameters as `dtype`, buffers in the model's dtype."""
    return {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype) if spec.kind == "buffer" else dtype)
        for spec in manifest.exported
    }


def lay_out(values: Tensor, fragment: Fragment, tensors: Mapping[str, Tensor]) -> None:
    """Copy a fragment's values [num_elements] into the tensors of its pieces, in the dtype of the tensors."""
    for piece in fragment.pieces:
        target, some = tensors[piece.tensor].view(-1), values[piece.bounds]
        target[piece.tensor_bounds] = some if target.is_floating_point() else some.round().to(target.dtype)


def write_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically, replacing an existing one. Equal tensors give equal bytes.
    Raises DataError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # as the umask says: others may read an exported model
        save_file(tensors, temporary, metadata={"format": "pt"})  # the order of several keys would vary
        temporary.chmod(mode)  # safetensors (0.8) writes a file that only its owner can read
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
