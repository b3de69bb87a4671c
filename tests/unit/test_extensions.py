"""Rules of others, found by name; and what every rule must do, ours and the example's alike."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from builders import make_contribution, make_settings, random_values
from diloco_common.codec import decode_payload, encode_payload, encoding_names, get_codec, offered_names, registry
from diloco_common.codec.memory import SLICE_ELEMENTS
from diloco_common.errors import ConfigError, UnknownEncoding
from diloco_common.extensions import find, plugin_names
from diloco_common.wire.manifest import Piece
from diloco_server.core.merge import merge
from diloco_server.core.outer import OUR_RULES, OuterOptimizer, make_outer_optimizer
from diloco_server.shell.rules import check_codecs, find_rules

ROOT = Path(__file__).resolve().parents[2]
OUTER = [*OUR_RULES, "own_outer_rule:Averaged", "delayed_nesterov:DelayedNesterov", "heloco:HeLoCo"]
MERGE = ["rda", "mean", "centered_clip:centered_clip", "own_outer_rule:by_length"]
SIZE = 96


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def make(name: str) -> OuterOptimizer:
    settings = make_settings(outer={"optimizer": name, "lr": 0.7, "momentum": 0.5})
    return make_outer_optimizer(settings.outer, find_rules(settings).outer)


def path(name: str, steps: range, state: tuple[torch.Tensor, list[torch.Tensor]] | None = None):
    optimizer = make(name)
    theta, buffers = state or (torch.zeros(SIZE), optimizer.new_buffers(SIZE))
    for outer_step in steps:
        optimizer.step(theta, random_values(SIZE, outer_step), buffers, outer_step)
    return theta, buffers


@pytest.mark.parametrize("name", OUTER)
def test_theta_and_buffers_are_all_that_is_remembered(name: str) -> None:
    """What a shard keeps is enough to go on after a restart."""
    theta, buffers = path(name, range(1, 3))
    restored = theta.clone(), [b.clone() for b in buffers]
    assert torch.equal(path(name, range(3, 6), restored)[0], path(name, range(1, 6))[0])


@pytest.mark.parametrize("name", [name for name in OUTER if "heloco" not in name])  # it looks at a slice as a whole
def test_how_a_fragment_is_cut_does_not_show(name: str) -> None:
    optimizer, size = make(name), SLICE_ELEMENTS + 3
    theta, gradient = random_values(size, 0), random_values(size, 1)
    tail = slice(SLICE_ELEMENTS - 2, SLICE_ELEMENTS + 2)
    alone, alone_gradient = theta[tail].clone(), gradient[tail].clone()
    optimizer.step(theta, gradient, optimizer.new_buffers(size), 1)
    optimizer.step(alone, alone_gradient, optimizer.new_buffers(4), 1)
    assert torch.equal(theta[tail], alone)


def merged(name: str, vectors: list[torch.Tensor]) -> torch.Tensor:
    contributions = [make_contribution(f"l{vector[0]}", vector, tokens=10) for vector in vectors]
    rule = find_rules(make_settings(sync={"merge": name})).merge
    pieces = [Piece("w", 0, SIZE, 0)]
    return torch.cat([part.tensor().clone() for part in merge(contributions, pieces, rule)])


@pytest.mark.parametrize("name", MERGE)
def test_a_merge_is_the_same_in_any_order_and_never_longer_than_the_longest(name: str) -> None:
    vectors = [random_values(SIZE, seed) * (seed + 1) for seed in range(4)]
    found = merged(name, vectors)
    assert torch.equal(found, merged(name, vectors[::-1]))
    assert found.norm() <= max(vector.norm() for vector in vectors) * (1 + 1e-5)


def test_a_rule_that_gives_nonsense_is_named() -> None:
    contributions = [make_contribution(f"l{i}", random_values(SIZE, i), tokens=10) for i in range(2)]
    for nonsense in ([1.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match=r"sync\.merge"):
            list(merge(contributions, [Piece("w", 0, SIZE, 0)], lambda *_, n=nonsense: n))


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"outer": {"optimizer": "no.such:Rule"}}, "PYTHONPATH"),
        ({"outer": {"optimizer": "own_outer_rule:by_length"}}, "not a subclass"),
        ({"outer": {"optimizer": "plugin:nothing"}}, "install it"),
        ({"sync": {"merge": "math:pi"}}, "not a function"),
    ],
)
def test_a_rule_that_is_not_there_or_no_rule_is_refused_when_a_shard_starts(sections, says) -> None:
    with pytest.raises(ConfigError, match=says):
        find_rules(make_settings(**sections))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("buffer_dtype = torch.float16", r"buffers in torch\.float16; say torch\.float32 or torch\.bfloat16"),
        ("def update(self, theta, gradient, buffers, outer_step): buffers[0].lerp_(gradient, 0.5)", "does not work"),
        ("def __init__(self, settings): self.rate = settings.no_such_setting", "does not work"),
    ],
)
def test_an_outer_optimizer_that_cannot_step_is_refused_when_a_shard_starts(body, says, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    head = "import torch\nfrom diloco_server.core.outer import Nesterov\nclass Mine(Nesterov):\n    "
    name = f"rule_{zlib.crc32(body.encode())}"
    (tmp_path / f"{name}.py").write_text(f"{head}{body}\n")
    with pytest.raises(ConfigError, match=says):
        find_rules(make_settings(outer={"optimizer": f"{name}:Mine"}))


def test_a_rule_goes_by_its_source_as_well_as_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = set()
    for text in ("def f(): return 1\n", "def f(): return 22\n"):
        (tmp_path / "changing_rule.py").write_text(text)
        sys.modules.pop("changing_rule", None)
        sources.add(find("diloco.merge", "changing_rule:f").source)
    assert len(sources) == 2
    assert all(len(source) == 16 for source in sources)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with a codec and an outer rule, as pip leaves it."""
    info = tmp_path / "their_rules-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rules\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[diloco.codec]\ntheirs = their_rules:CODEC\nwrong = their_rules:WRONG\n"
        "[diloco.outer]\nslow = their_rules:Slow\n"
    )
    (tmp_path / "their_rules.py").write_text(
        "from diloco_common.codec.registry import Float32\nfrom diloco_server.core.outer import Sgd\n"
        "class Theirs(Float32):\n    name = 'plugin:theirs'\n"
        "class Slow(Sgd):\n    pass\nCODEC = Theirs()\nWRONG = Theirs()\n"
    )
    plugin_names.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    plugin_names.cache_clear()
    registry._plugin.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_plugin_is_found_by_the_name_of_its_entry_point() -> None:
    settings = make_settings(outer={"optimizer": "plugin:slow"})
    rules = find_rules(settings)
    assert type(make_outer_optimizer(settings.outer, rules.outer)).__name__ == "Slow"
    assert rules.sources["outer.optimizer"].startswith("plugin:slow ")


@pytest.mark.usefixtures("installed")
def test_a_codec_that_is_installed_encodes_and_a_learner_says_that_it_has_it() -> None:
    assert "plugin:theirs" in encoding_names()
    values = random_values(SIZE, 0)
    payload, out = encode_payload(values, "plugin:theirs"), torch.empty(SIZE)
    decode_payload(payload, out)
    assert torch.equal(out, values)
    assert find_rules(make_settings(sync={"push": "plugin:theirs"})).sources["sync.push"].startswith("plugin:theirs ")
    with pytest.raises(UnknownEncoding, match="calls itself"):
        get_codec("plugin:wrong")


@pytest.mark.usefixtures("installed")
def test_a_learner_whose_codec_has_another_source_is_refused() -> None:
    settings = make_settings(sync={"push": "plugin:theirs"})
    sources = find_rules(settings).sources
    offered = offered_names()
    assert {"int8", "plugin:theirs"} < set(offered)
    check_codecs(settings.sync, sources, offered)
    check_codecs(settings.sync, sources, encoding_names())  # a learner that does not say which
    edited = [offer.partition("@")[0] + "@0123456789abcdef" if "@" in offer else offer for offer in offered]
    with pytest.raises(UnknownEncoding, match=r"0123456789abcdef.*same version"):
        check_codecs(settings.sync, sources, edited)
    with pytest.raises(UnknownEncoding, match="install what is missing"):
        check_codecs(settings.sync, sources, ["int8", "bfloat16"])


def test_a_name_from_elsewhere_loads_no_module() -> None:
    plugin_names.cache_clear()
    sys.modules.pop("own_outer_rule", None)
    for name in ("own_outer_rule:by_length", "plugin:theirs", "plugin:own_outer_rule"):
        with pytest.raises(UnknownEncoding):
            get_codec(name)
    assert "own_outer_rule" not in sys.modules
