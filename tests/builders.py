"""Small things that tests of the cores are made of: models, payloads, contributions, settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco_common.codec import Chunk, Payload, crc32c, decode_payload, encode_payload
from diloco_common.settings import Settings
from diloco_common.wire import protobuf
from diloco_common.wire.manifest import Piece, TensorSpec
from diloco_common.wire.messages import PROTOCOL, JoinRequest
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.core.merge import merge as merged_slices
from diloco_server.core.merge import piece_norms
from diloco_server.core.round import Contribution


def make_settings(**sections: dict[str, Any]) -> Settings:
    """Settings with float32 both ways and no learner evicted by accident; `sections` override them by key."""
    defaults: dict[str, dict[str, Any]] = {
        "sync": {"push": "float32", "pull": "float32", "fragments": 1, "grace": 0.0},
        "lease": {"lease_s": 6.0, "heartbeat_s": 1.0},
    }
    return Settings.model_validate({key: defaults.get(key, {}) | sections.get(key, {}) for key in defaults | sections})


def chunk_request(chunk: Chunk) -> pb.PushRequest:
    """The message of a chunk, as a caller makes it that has only the generated classes."""
    return pb.PushRequest(chunk=bytes(chunk), crc32c=crc32c(chunk))


def push_bodies(header: pb.PushHeader, payload: Payload) -> list[bytes]:
    """The messages of a push as they are sent; the header gets that of the payload."""
    header.payload.CopyFrom(protobuf.to_pb(payload.header))
    messages = [pb.PushRequest(header=header), *(chunk_request(chunk) for chunk in payload.chunks)]
    return [message.SerializeToString() for message in messages]


def random_values(num_elements: int, seed: int) -> Tensor:
    """float32 [num_elements], normal."""
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


def decoded(payload: Payload) -> Tensor:
    """float32 [num_elements]."""
    out = torch.full((payload.header.num_elements,), torch.nan)
    decode_payload(payload, out)
    return out


def merge(contributions: Sequence[Contribution], pieces: Sequence[Piece], rule: str) -> Tensor:
    """The merged pseudo-gradient of all pieces: float32 [num_elements]."""
    return torch.cat([merged.tensor().clone() for merged in merged_slices(contributions, pieces, rule)])


def one_piece(num_elements: int, *, mean_merge: bool = False) -> tuple[Piece, ...]:
    return (Piece("w", 0, num_elements, 0, "mean" if mean_merge else "run"),)


def asking(tensors: Sequence[TensorSpec], process_id: str = "process", **more: Any) -> JoinRequest:
    """For a lease."""
    return JoinRequest(PROTOCOL, process_id, tuple(tensors), **more)


def make_contribution(
    learner_id: str,
    values: Tensor,
    *,
    pieces: tuple[Piece, ...] | None = None,
    tokens: int = 1,
    steps: int = 1,
    encoding: str = "float32",
    round_number: int = 1,
    chunk_elements: int = 256,
) -> Contribution:
    """A contribution as a shard holds it: compressed, with the norms of its pieces."""
    payload = encode_payload(values.clone(), encoding, chunk_elements=chunk_elements)
    norms = piece_norms(payload, pieces or one_piece(values.numel()))
    base = round_number - 1
    return Contribution(learner_id, 1, 0, round_number, base, tokens, steps, payload, norms)


class TinyText(nn.Module):
    """Predicts the next of 32 tokens: an embedding, two layers, an output head. Same weights for the same seed."""

    VOCABULARY = 32

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, 16)
        self.hidden = nn.Linear(16, 24)
        self.middle = nn.Linear(24, 16)
        self.head = nn.Linear(16, self.VOCABULARY)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.2, generator=generator)

    def loss(self, batch: Tensor) -> Tensor:
        """`batch`: int64 [sequences, length]."""
        logits = self.head(torch.tanh(self.middle(torch.tanh(self.hidden(self.embedding(batch[:, :-1]))))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make_batch(seed: int, sequences: int = 8, length: int = 6) -> Tensor:
    """int64 [sequences, length] of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TinyText.VOCABULARY, (sequences, length), generator=generator)


def inner_step(model: TinyText, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model.loss(batch).backward()
    optimizer.step()


def parameters_apart(a: nn.Module, b: nn.Module) -> float:
    """The largest difference between two models, over all parameters."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)
