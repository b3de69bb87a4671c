"""Look at the global model without joining: pull every fragment from every shard, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import torch
from torch import Tensor

from diloco_common import protobuf, rpc
from diloco_common.codec import decode_payload
from diloco_common.errors import CannotConnect, ConfigError, ManifestMismatch
from diloco_common.identity import Identity
from diloco_common.manifest import Fragment, Manifest, cut
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_worker.export import lay_out
from diloco_worker.transfer import read_version

CALL_S = 120.0


@dataclass(frozen=True)
class GlobalModel:
    """The latest announced version of every fragment. Each is whole; they may be of different ages."""

    tensors: dict[str, Tensor]
    """By the user's own parameter names, float32."""
    versions: dict[int, int]
    """Fragment -> version."""
    tokens_merged: int


def pull_global_model(
    shards: Sequence[str], *, run: str = "local", token: str | None = None, wait_s: float = 5.0
) -> GlobalModel:
    """Pull the global model.

    Raises CannotConnect if a shard does not answer within `wait_s`, ConfigError or ManifestMismatch if the shards do
    not make up one run, and the Refusal that a shard answers.
    """
    return asyncio.run(_pull_all(shards, rpc.metadata_of(Identity(run), token), wait_s))


async def _pull_all(shards: Sequence[str], metadata: tuple[tuple[str, str], ...], wait_s: float) -> GlobalModel:
    channels = [grpc.aio.insecure_channel(address, options=rpc.CHANNEL_OPTIONS) for address in shards]
    try:
        stubs = [pb_grpc.ParameterServerStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
        request = pb.JoinRequest(protocol=rpc.PROTOCOL, observe=True)
        answers = []
        for address, stub in zip(shards, stubs, strict=True):
            try:
                answers.append(await stub.Join(request, metadata=metadata, timeout=wait_s, wait_for_ready=True))
            except grpc.aio.AioRpcError as error:
                raise rpc.refusal_of(error) or _unreachable(address, error) from None
        manifest = _manifest(shards, answers)
        tensors = {spec.name: torch.empty(spec.shape) for spec in manifest.tensors}
        versions: dict[int, int] = {}
        for answer, stub, address in zip(answers, stubs, shards, strict=True):
            for fragment in manifest.owned_by(answer.shard_index):
                try:
                    versions[fragment.fragment_id] = await _pull(stub, fragment, metadata, tensors)
                except grpc.aio.AioRpcError as error:
                    raise rpc.refusal_of(error) or _unreachable(address, error) from None
        return GlobalModel(tensors, versions, max(answer.pulse.tokens_merged for answer in answers))
    finally:
        for channel in channels:
            await channel.close()


async def _pull(
    stub: pb_grpc.ParameterServerStub,
    fragment: Fragment,
    metadata: tuple[tuple[str, str], ...],
    tensors: dict[str, Tensor],
) -> int:
    """Lay the fragment's latest version into the tensors; returns its number."""
    request = pb.PullRequest(fragment_id=fragment.fragment_id, encodings=["float32"])
    call = stub.Pull(request, metadata=metadata, timeout=CALL_S)
    header, payload = await read_version(call, request, fragment.num_elements)
    assert payload is not None, "an observer has no version yet"
    values = torch.empty(fragment.num_elements)
    decode_payload(payload, values)
    lay_out(values, fragment, tensors)
    return int(header.version)


def _manifest(shards: Sequence[str], answers: Sequence[pb.JoinResponse]) -> Manifest:
    """The manifest that all shards agree on."""
    first = answers[0]
    found = sorted(answer.shard_index for answer in answers)
    if found != list(range(first.num_shards)):
        raise ConfigError(f"the run has {first.num_shards} shards, the addresses given are those of {found}; name all")
    manifest = cut(protobuf.tensors_from_pb(first.tensors), first.num_fragments, first.num_shards)
    for address, answer in zip(shards, answers, strict=True):
        if answer.manifest_digest != manifest.digest:
            raise ManifestMismatch(f"{address} holds another model than {shards[0]}; are they of one run?")
    return manifest


def _unreachable(address: str, error: grpc.aio.AioRpcError) -> CannotConnect:
    return CannotConnect(f"no shard answers at {address} ({error.code().name.lower()}: {error.details()})")
