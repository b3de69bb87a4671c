"""`diloco plan` and `diloco plan memory`."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.command import new_app
from diloco_common.errors import ConfigError
from diloco_common.options import Json, number
from diloco_deploy.plan.quantities import bits_per_s

_PARAMS = number(quantities.count, 1, 10**13, "a number of parameters, such as 125M or 70B")
_WHOLE = number(quantities.count, 1, 1_000_000, "a whole number from 1 to 1,000,000")
_RATE = number(bits_per_s, 1e3, 1e13, "a rate, such as 100Mbit, 1Gbit/s or 12MB/s")
_DISK = number(quantities.num_bytes, 1e5, 1e12, "bytes per second, such as 300MB")
_SECONDS = number(quantities.seconds, 1e-4, 86_400.0, "a time, such as 1s or 250ms")
_DELAY = number(quantities.seconds, 0.0, 60.0, "a time, such as 80ms")
Params = Annotated[int | None, Parameter(converter=_PARAMS, metavar="125M", help="parameters of the model")]
Model = Annotated[
    str | None, Parameter(metavar="PKG:BUILD", help="function that makes the model; it gets no memory")
]  # fmt: skip
Rate = Annotated[
    float,
    Parameter(
        converter=_RATE, metavar="100Mbit", help="of a learner's link, towards the shards", show_default="100Mbit"
    ),
]
Down = Annotated[
    float | None,
    Parameter(converter=_RATE, metavar="100Mbit", help="of a learner's link, from the shards", show_default="as --up"),
]
Delay = Annotated[float, Parameter(converter=_DELAY, metavar="80ms", help="there and back", show_default="80ms")]
Step = Annotated[float, Parameter(converter=_SECONDS, metavar="1s", help="of one inner step", show_default="1s")]
Fragments = Annotated[
    int | None, Parameter(converter=_WHOLE, metavar="P", help="fragments", show_default="chosen")
]  # fmt: skip
Companions = Annotated[
    int | None,
    Parameter(
        converter=_WHOLE, metavar="N", help="momentum is averaged too, N times as rarely (sync.companions_every)",
        show_default="it is not",
    ),
]  # fmt: skip
Outer = Annotated[Literal["nesterov", "sgd", "adam"], Parameter(help="the outer optimizer")]

app = new_app("plan", "Settings and sizes of a run: from the model, the learners and their links.")


@app.default
def plan(
    *,
    params: Params = None,
    model: Model = None,
    learners: Annotated[int, Parameter(converter=_WHOLE, metavar="L", help="learners of the run")] = 8,
    up: Rate = 1e8,
    down: Down = None,
    round_trip: Delay = 0.08,
    step_time: Step = 1.0,
    fragments: Fragments = None,
    shards: Annotated[
        int | None, Parameter(converter=_WHOLE, metavar="S", help="shards", show_default="chosen")
    ] = None,
    outer: Outer = "nesterov",
    shard_link: Annotated[
        float | None, Parameter(converter=_RATE, metavar="10Gbit", help="link of a shard's machine, each way")
    ] = None,
    disk: Annotated[
        float | None, Parameter(converter=_DISK, metavar="300MB", help="what a shard's disk writes in a second")
    ] = None,
    companions_every: Companions = None,
    json: Json = False,
) -> int:
    """Propose H, encodings, fragments and shards, and say how much memory, disk and bandwidth the run takes: with the
    formulas, and as settings to paste into run.toml. Nothing is measured, and nobody is asked.
    """
    from diloco_deploy.plan.choice import Asked, Link
    from diloco_deploy.plan.command import plan

    link = Link(up, up if down is None else down, round_trip)
    asked = Asked(
        _params(params, model), learners, link, step_time, fragments, shards, outer, shard_link, disk, companions_every
    )
    return plan(asked, as_json=json)


@app.command(help="what one process of a learner holds, on one GPU or as a rank of an island")
def memory(
    *,
    params: Params = None,
    model: Model = None,
    ranks: Annotated[
        int, Parameter(converter=_WHOLE, metavar="R", help="ranks of the island (FSDP2); 1: no island")
    ] = 1,
    push: Annotated[str, Parameter(metavar="ENCODING", help="of contributions")] = "int8",
    pull: Annotated[str, Parameter(metavar="ENCODING", help="of versions")] = "bfloat16",
    fragments: Annotated[int, Parameter(converter=_WHOLE, metavar="P", help="fragments")] = 24,
    under_way: Annotated[
        int, Parameter(converter=_WHOLE, metavar="N", help="fragments under way at once; `diloco plan` says how many")
    ] = 2,
    json: Json = False,
) -> int:
    """Say how much memory one process of a learner takes, with the formulas."""
    from diloco_deploy.plan.choice import Encodings
    from diloco_deploy.plan.command import memory
    from diloco_deploy.plan.formulas import BITS

    for encoding in (push, pull):
        if encoding not in BITS:
            raise ConfigError(f"there is no encoding {encoding}; choose one of {', '.join(BITS)}")
    if min(ranks, fragments, under_way) < 1:
        raise ConfigError("--ranks, --fragments and --under-way are 1 or more")
    found = Encodings(push, pull, "")
    return memory(_params(params, model), found, fragments, ranks, min(under_way, fragments), as_json=json)


def _params(params: int | None, model: str | None) -> int:
    if (params is None) == (model is None):
        raise ConfigError("give --params or --model, one of them: diloco plan --params 125M")
    if model is not None:
        from diloco_deploy.plan.model import parameters_of

        return parameters_of(model)
    assert params is not None
    return params
