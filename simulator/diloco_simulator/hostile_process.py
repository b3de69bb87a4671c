"""A hostile learner in a simulated process."""

from __future__ import annotations

import asyncio

from torch import Tensor

from diloco_common.wire.manifest import Fragment, TensorSpec, cut
from diloco_simulator.hostile import HostileLearner
from diloco_simulator.model import AVERAGED, PATTERN, SHAPES, part_of
from diloco_simulator.plot import Plot
from diloco_simulator.process import Process
from diloco_simulator.stage import Stage
from diloco_simulator.transport import UntrustedTransport

TENSORS = tuple(
    TensorSpec(name, shape, "mean" if name in AVERAGED else "run") for name, shape in sorted(SHAPES.items())
)


class HostileProcess:
    """A process that does harm until it is killed."""

    def __init__(self, cluster: Stage, number: int) -> None:
        options, name = cluster.options, f"x{number}"
        self.process = Process(cluster.timeline, name, cluster.seed_of(name), lambda _: 0.0)
        plot = Plot(
            "local", cut(TENSORS, options.fragments, options.shards), options.push, options.pull, _honest,
            lambda: cluster.network.sniffed, options.tactics, options.manners, options.answers,
            min(options.step_s), options.call_s,
        )  # fmt: skip
        transports = [
            UntrustedTransport(
                cluster.network, self.process, (name, shard), name if options.identities_proven else None,
                cluster.has_model, options.call_s,
            )
            for shard in range(options.shards)
        ]  # fmt: skip
        self.learner = HostileLearner(name, transports, plot, self.process.random, cluster.count)
        self._begins_s = self.process.random.random() * options.starts_s
        self.process.start(self._live(), name)

    async def _live(self) -> None:
        await asyncio.sleep(self._begins_s)
        await self.learner.run()


def _honest(fragment: Fragment, tokens: int) -> Tensor:
    """What training on so many tokens adds, with the sign of a contribution."""
    return -tokens * part_of(PATTERN, fragment)
