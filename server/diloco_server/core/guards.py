"""What a shard refuses before it can touch state. Each check raises a `Refusal` that says what to do.

The whole order: identity and run (the shell), lease and generation (membership.py); from the header alone manifest,
epoch, round, sizes (here); of the bytes sizes, checksum, decoder limits (codec); finite values, norm (trust).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diloco_common.codec import check_header
from diloco_common.errors import ManifestMismatch, TooStale, WrongEpoch, WrongRound
from diloco_common.manifest import Manifest, TensorSpec, differences, kinds_of, model_digest
from diloco_common.messages import PushHeader
from diloco_server.core.fragment import FragmentState
from diloco_server.core.parts import check_ranges, is_part

SEED_ENCODINGS = ("float32", "bfloat16")


def check_model(mine: Manifest, theirs: Sequence[TensorSpec]) -> None:
    """What the caller synchronises is what the shard has. Raises ManifestMismatch with the first differences."""
    different = differences(mine.tensors, theirs)
    if not different:
        return
    table = "; ".join(different)
    if not differences(mine.exported, [t for t in theirs if t.traits.is_exported]):
        here, there = ([t for t in tensors if not t.traits.is_exported] for tensors in (mine.tensors, theirs))
        raise ManifestMismatch(
            "the models are the same, but the momentum that learners average is not: "
            f"{_what_is_averaged(here, there)}. All learners of a run give the same kind of optimizer for each "
            "parameter to join(companions=), or none; workers have the same train.average_momentum and train.optimizer "
            f"(shard <-> caller): {table}"
        )
    raise ManifestMismatch(f"the model differs from the shard's (shard <-> caller): {table}")


def _what_is_averaged(here: Sequence[TensorSpec], there: Sequence[TensorSpec]) -> str:
    """Of the momentum of both sides, which differs."""
    if here and there:
        kinds = [" and ".join(kinds_of(tensors)) or "another optimizer" for tensors in (here, there)]
        if kinds[0] != kinds[1]:
            return (
                f"this run averages that of {kinds[0]}, and the caller has that of {kinds[1]}, which means other values"
            )
        return "this run averages other tensors than the caller"
    return f"this run averages {'momentum' if here else 'none'}, and the caller {'some' if there else 'none'}"


def check_model_digest(expected: str, theirs: Sequence[TensorSpec]) -> None:
    """The caller's model is the one that the shard insists on, if it does. Raises ManifestMismatch."""
    if not expected or (found := model_digest(theirs)) == expected:
        return
    if model_digest(t for t in theirs if t.traits.is_exported) == expected:
        raise ManifestMismatch(
            f"this shard insists on the model {expected} (run.model), which the caller brings, but that is its digest "
            f"without the momentum that the caller wants averaged: start all shards with run.model={found} (printed by "
            "`diloco-worker digest` with train.average_momentum = true, given by digest_of(model, companions=...)), or "
            "leave the momentum local"
        )
    raise ManifestMismatch(
        f"this shard insists on the model {expected} (run.model), but the caller brings {found}: train the same "
        "model, average the momentum of the same kind of optimizer as the others, or none, or start all shards with "
        f"run.model={found}"
    )


def check_origin(header: PushHeader, manifest: Manifest) -> None:
    """The contribution is for this model. Raises ManifestMismatch."""
    if header.manifest_digest != manifest.digest:
        raise ManifestMismatch(
            f"manifest {header.manifest_digest[:12]!r} is not this run's {manifest.digest[:12]!r}; join again"
        )


def is_in_line(header: PushHeader, state: FragmentState, epoch: int) -> bool:
    """Whether the fragment's latest version is the base version, or came from it.

    A version that was lost is never in line: its number was given again, in another epoch.
    """
    if header.is_seed or not state.seeded:
        return header.epoch == epoch
    if header.epoch == state.epoch:
        return True
    return state.recovered is not None and (
        header.epoch == state.recovered[0] and header.base_version <= state.recovered[1]
    )


def check_epoch(header: PushHeader, state: FragmentState, epoch: int) -> None:
    """Raises WrongEpoch if the latest version did not come from the contribution's base version."""
    if not is_in_line(header, state, epoch):
        raise WrongEpoch(
            f"fragment {header.fragment_id}: version {header.base_version} of epoch {header.epoch} is over, "
            f"version {state.version} of epoch {state.epoch or epoch} did not come from it; pull first"
        )


def check_round(header: PushHeader, state: FragmentState, learner_id: str, staleness_max: int) -> None:
    """The round is open and asked this learner, which can have the base version. Raises WrongRound or TooStale."""
    where = f"fragment {header.fragment_id}"
    if header.steps < 1 or header.tokens < 1:
        raise WrongRound(
            f"{where}: a contribution takes at least 1 step and 1 token, got {header.steps} and {header.tokens}"
        )
    if state.round is None or header.round != state.round.round:
        raise WrongRound(f"{where}: round {header.round} is not open (latest version {state.version})")
    if learner_id not in state.round.asked or learner_id in state.round.lost:
        raise WrongRound(f"{where}: round {header.round} did not ask {learner_id}")
    if header.base_version > state.version:
        raise WrongRound(f"{where}: base version {header.base_version} does not exist yet, latest is {state.version}")
    if state.version - header.base_version > staleness_max:
        raise TooStale(
            f"{where}: base version {header.base_version} is {state.version - header.base_version} versions old, "
            f"at most {staleness_max} are merged (sync.staleness_max); pull first"
        )


def check_sizes(header: PushHeader, state: FragmentState, encodings: Collection[str]) -> None:
    """The announced bytes are what fragment, ranges and encoding imply. Raises BadSize or UnknownEncoding."""
    num_elements = state.fragment.num_elements
    if is_part(header) or header.ranges:
        num_elements = check_ranges(header, num_elements)
        if not header.ranges:
            return
    check_header(header.payload, num_elements, encodings)
