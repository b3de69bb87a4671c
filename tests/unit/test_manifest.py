"""How a model is cut: everything once, flat, placed evenly, and the same wherever it is computed."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_common.errors import BadRequest
from diloco_common.wire.manifest import (
    Manifest,
    Rule,
    TensorSpec,
    buffer_spec,
    check_kinds,
    companion_of,
    cut,
    differences,
    model_digest,
    spec_of,
)
from diloco_common.wire.protobuf import tensors_from_pb, tensors_to_pb
from diloco_protos import parameter_server_pb2 as pb

SHAPES = st.lists(st.integers(0, 12), max_size=3).map(tuple)
MODELS = (
    st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.tuples(SHAPES, st.booleans()), max_size=12)
    .map(lambda named: [TensorSpec(name, shape, "mean" if mean else "run") for name, (shape, mean) in named.items()])
    .filter(lambda tensors: any(t.num_elements for t in tensors))
)


def num_pieces(manifest: Manifest) -> int:
    return sum(len(f.pieces) for f in manifest.fragments)


def loads(manifest: Manifest) -> list[int]:
    return [f.num_elements for f in manifest.fragments]


@given(tensors=MODELS, num_fragments=st.integers(1, 30))
def test_every_element_lies_in_exactly_one_piece(tensors: list[TensorSpec], num_fragments: int) -> None:
    manifest = cut(tensors, num_fragments, 1)
    covered: dict[str, list[tuple[int, int]]] = {}
    for fragment in manifest.fragments:
        names = [(p.tensor, p.tensor_offset) for p in fragment.pieces]
        assert names == sorted(names), "pieces lie by name"
        offset = 0
        for piece in fragment.pieces:
            assert piece.offset == offset, "pieces lie end to end"
            offset += piece.num_elements
            covered.setdefault(piece.tensor, []).append((piece.tensor_offset, piece.num_elements))
    for tensor in tensors:
        end = 0
        for start, num_elements in sorted(covered.pop(tensor.name, [])):
            assert start == end
            assert num_elements > 0
            end += num_elements
        assert end == tensor.num_elements
    assert covered == {}
    assert manifest.num_elements == sum(t.num_elements for t in tensors)


@given(tensors=MODELS, num_fragments=st.integers(1, 30))
def test_fragments_differ_by_at_most_one_piece(tensors: list[TensorSpec], num_fragments: int) -> None:
    """The bound of greedy packing: the last piece in the fullest bin was put there when it was the lightest."""
    manifest = cut(tensors, num_fragments, 1)
    largest = max(p.num_elements for f in manifest.fragments for p in f.pieces)
    assert max(loads(manifest)) - min(loads(manifest)) <= largest
    assert len(manifest.fragments) == min(num_fragments, num_pieces(manifest))
    assert min(loads(manifest)) > 0


@given(tensors=MODELS, num_fragments=st.integers(1, 12), num_shards=st.integers(1, 6))
def test_shards_differ_by_at_most_one_fragment(tensors: list[TensorSpec], num_fragments: int, num_shards: int) -> None:
    if num_shards > len(cut(tensors, num_fragments, 1).fragments):
        with pytest.raises(ValueError, match="every shard must own at least one"):
            cut(tensors, num_fragments, num_shards)
        return
    manifest = cut(tensors, num_fragments, num_shards)
    owned = [manifest.owned_by(i) for i in range(num_shards)]
    assert sorted(f.fragment_id for fragments in owned for f in fragments) == list(range(len(manifest.fragments)))
    sizes = [sum(f.num_elements for f in fragments) for fragments in owned]
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= max(loads(manifest))


@given(tensors=MODELS, num_fragments=st.integers(1, 30), seed=st.integers())
def test_the_order_in_which_tensors_are_named_changes_nothing(
    tensors: list[TensorSpec], num_fragments: int, seed: int
) -> None:
    shuffled = list(tensors)
    random.Random(seed).shuffle(shuffled)
    assert cut(shuffled, num_fragments, 1) == cut(tensors, num_fragments, 1)
    assert cut(shuffled, num_fragments, 1).digest == cut(tensors, num_fragments, 1).digest


# With 24 fragments the pieces are nearly as large as a fragment, and some fragments hold one, some two of them.


# The digest is part of the protocol: another implementation must come to the same one.
def test_the_digest_is_the_same_in_every_release() -> None:
    manifest = cut([TensorSpec("b", ()), TensorSpec("a", (4, 2), "mean"), TensorSpec("empty", (0,))], 2, 1)
    assert manifest.digest == "c8d66a4914d647d78cb123ebc99a8c58"


@pytest.mark.parametrize(
    "other",
    [
        cut([TensorSpec("a", (4, 3)), TensorSpec("b", (6,))], 3, 1),
        cut([TensorSpec("a", (4, 3)), TensorSpec("b", (6,))], 2, 2),
        cut([TensorSpec("a", (3, 4)), TensorSpec("b", (6,))], 2, 1),
        cut([TensorSpec("a", (4, 3), "mean"), TensorSpec("b", (6,))], 2, 1),
        cut([TensorSpec("A", (4, 3)), TensorSpec("b", (6,))], 2, 1),
        cut([TensorSpec("a", (4, 3)), TensorSpec("b", (6,)), TensorSpec("c", (0,))], 2, 1),
    ],
    ids=["fragments", "shards", "shape", "merge", "name", "empty-tensor"],
)
def test_whatever_differs_shows_in_the_digest(other: Manifest) -> None:
    assert other.digest != cut([TensorSpec("a", (4, 3)), TensorSpec("b", (6,))], 2, 1).digest


@pytest.mark.parametrize(
    ("tensors", "num_fragments", "num_shards", "words"),
    [
        ([], 1, 1, "no trainable elements"),
        ([TensorSpec("w", (0,))], 1, 1, "no trainable elements"),
        ([TensorSpec("w", (2,)), TensorSpec("w", (3,))], 1, 1, r"have the same name: \['w'\]"),
        ([TensorSpec("w", (4, 3)), TensorSpec("v", (-1, 12))], 1, 1, r"tensor 'v' has shape \[-1, 12\]"),
        ([TensorSpec("w", (2,))], 0, 1, "at least 1, got 0 and 1"),
        ([TensorSpec("w", (2,))], 24, 3, "3 shards are too many for 2 fragments"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    tensors: list[TensorSpec], num_fragments: int, num_shards: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        cut(tensors, num_fragments, num_shards)


def test_differences_are_named_with_both_sides() -> None:
    same = TensorSpec("same", (2,))
    mine = [same, TensorSpec("shape", (2, 3)), TensorSpec("merge", (4,), "mean"), TensorSpec("mine", ())]
    theirs = [same, TensorSpec("shape", (3, 2)), TensorSpec("merge", (4,)), TensorSpec("theirs", (5,))]
    assert differences(mine, theirs) == [
        "merge: [4] (mean merge) <-> [4]",
        "mine: [] <-> absent",
        "shape: [2, 3] <-> [3, 2]",
        "theirs: absent <-> [5]",
    ]


def with_companions(tensors: list[TensorSpec]) -> list[TensorSpec]:
    """Each tensor, and a companion of the same shape whose name sorts before, between or after the others."""
    return [*tensors, *(TensorSpec(f"b of {t.name}", t.shape, rule="mean", kind="momentum") for t in tensors)]


@given(tensors=MODELS, num_fragments=st.integers(1, 12), num_shards=st.integers(1, 4))
def test_companions_change_nothing_of_the_model_and_are_never_mixed_with_it(
    tensors: list[TensorSpec], num_fragments: int, num_shards: int
) -> None:
    if len(cut(tensors, num_fragments, 1).fragments) < num_shards:
        return
    model, both = (cut(of, num_fragments, num_shards) for of in (tensors, with_companions(tensors)))
    assert both.model_fragments == model.fragments == both.fragments[: len(model.fragments)]
    assert both.num_elements == model.num_elements
    companions = both.fragments[len(model.fragments) :]
    assert [f.fragment_id for f in both.fragments] == list(range(len(both.fragments)))
    for fragment in both.fragments:
        marks = {p.tensor.startswith("b of ") for p in fragment.pieces}
        assert marks == {not fragment.traits.is_of_model}
    # The same shapes under names of the same order are cut and placed alike.
    assert [(f.shard_index, f.num_elements) for f in companions] == [
        (f.shard_index, f.num_elements) for f in model.fragments
    ]
    assert [both.place(f) for f in both.fragments] == 2 * [(i, len(companions)) for i in range(len(companions))]


def test_companions_are_in_both_digests() -> None:
    model = [TensorSpec("w", (4, 2)), TensorSpec("v", (3,), rule="mean")]
    tensors = with_companions(model)
    assert cut(model, 2, 1).digest != cut(tensors, 2, 1).digest
    assert model_digest(model) != model_digest(tensors) == model_digest(tensors[::-1])
    as_parameters = [t._replace(kind="parameter") for t in tensors]
    assert cut(as_parameters, 4, 1).digest != cut(tensors, 2, 1).digest
    assert model_digest(as_parameters) != model_digest(tensors)
    # What earlier releases have computed, and runs have in their settings and files.
    assert model_digest(model) == "c8a371447666cde779169300d5d22104"
    assert cut(model, 2, 1).digest == "471f31a794562dba4db6ce189fa60d37"


@pytest.mark.parametrize(
    ("companion", "is_taken"),
    [
        (TensorSpec("momentum of w (Adam)", (4, 2), "mean", "momentum"), "mean"),
        (TensorSpec("momentum of w (Adam)", (2, 4), "mean", "momentum"), False),
        (TensorSpec("momentum of v (Adam)", (4, 2), "mean", "momentum"), False),
        (TensorSpec("momentum of w (Lion)", (4, 2), "mean", "momentum"), False),
        (TensorSpec("momentum of momentum of w (Adam) (Adam)", (4, 2), "mean", "momentum"), False),
    ],
)
def test_a_companion_is_the_momentum_of_a_parameter_of_its_shape(companion: TensorSpec, is_taken: bool) -> None:
    tensors = [TensorSpec("w", (4, 2)), TensorSpec("momentum of w (Adam)", (4, 2), "mean", "momentum"), companion]
    with nullcontext() if is_taken else pytest.raises(BadRequest, match="the momentum of no parameter of shape"):
        check_kinds(tensors)


def test_a_parameter_has_one_companion() -> None:
    """Else whoever comes first may make everyone's rounds larger."""
    w = TensorSpec("w", (4, 2))
    with pytest.raises(BadRequest, match="are of one parameter"):
        check_kinds([w, companion_of(w, "Adam"), companion_of(w, "SGD")])


def norm(path: str, width: int, rule: Rule = "variance") -> list[TensorSpec]:
    """The buffers of a BatchNorm."""
    named = {"running_mean": "mean", "running_var": rule, "num_batches_tracked": "most"}
    dtypes = {"num_batches_tracked": "int64"}
    return [
        buffer_spec(f"{path}.{leaf}", () if leaf in dtypes else (width,), of, dtypes.get(leaf, "float32"))
        for leaf, of in named.items()
    ]


@given(tensors=MODELS, num_fragments=st.integers(1, 12), widths=st.lists(st.integers(1, 5000), max_size=6))
def test_buffers_come_last_and_what_one_rule_needs_is_in_one_fragment(
    tensors: list[TensorSpec], num_fragments: int, widths: list[int]
) -> None:
    buffers = [t for i, width in enumerate(widths) for t in norm(f"n{i}", width)]
    buffers.append(buffer_spec("teacher.weight", (4000, 2), "mean", "bfloat16"))
    before = cut(with_companions(tensors), num_fragments, 1)
    manifest = cut([*with_companions(tensors), *buffers], num_fragments, 1)
    assert manifest.fragments[: len(before.fragments)] == before.fragments
    of_buffers = manifest.fragments[len(before.fragments) :]
    assert {f.kind for f in of_buffers} == {"buffer"}
    assert sum(f.num_elements for f in of_buffers) == sum(t.num_elements for t in buffers)
    assert [manifest.place(f) for f in of_buffers] == [(i, len(of_buffers)) for i in range(len(of_buffers))]
    for i in range(len(widths)):
        homes = [f.fragment_id for f in of_buffers for p in f.pieces if p.tensor.startswith(f"n{i}.")]
        assert len(homes) == 3
        assert len(set(homes)) == 1


@pytest.mark.parametrize(
    "spec",
    [TensorSpec("w", (4, 2)), TensorSpec("w", (), "mean"), companion_of(TensorSpec("w", (3,)), "Adam"), *norm("n", 4)],
)
def test_a_tensor_survives_files_and_the_wire(spec: TensorSpec) -> None:
    assert spec_of(json.loads(json.dumps(spec.as_json()))) == spec
    (message,) = tensors_to_pb([spec])
    assert tensors_from_pb([type(message).FromString(message.SerializeToString())]) == [spec]


def test_tensors_that_nobody_can_mean_are_refused() -> None:
    for entries in (
        ["w"], ["w", [1]], ["w", [1], None], ["w", [1], "median", "float32"], ["w", [1], "mean", "evil"],
        ["w", [1], "run", "float32"], [1, [1], True], ["w", ["1"], True], ["w", [1], True, "x"],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"tensor|buffer|unpack"):
            spec_of(entries)
    with pytest.raises(BadRequest, match="not known here"):
        tensors_from_pb([pb.Tensor(name="w", shape=[1], buffer="median", dtype="float32")])
    with pytest.raises(BadRequest, match="no running mean"):
        check_kinds([TensorSpec("w", (4,)), *norm("n", 4)[1:]])
    check_kinds([TensorSpec("w", (4,)), *norm("n", 4)])
