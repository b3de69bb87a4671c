"""The average of the versions: the formula within what bfloat16 keeps of it, and the same bits after a restart."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builders import make_contribution, random_values
from diloco_common.observe.logs import Log
from diloco_common.settings import Settings
from diloco_server.core.arithmetic import Making, seed, step
from diloco_server.core.outer import make_outer_optimizer
from diloco_server.shell.keeper import recover
from diloco_server.storage.version_file import version_name
from diloco_simulator.world.disk import FakeDisk
from stores import MANIFEST, SIZE, make_version, open_store

FRAGMENT = MANIFEST.fragments[0]


def settings(average: float) -> Settings:
    return Settings.model_validate({"outer": {"average": average}})


class Run:
    """Versions of one fragment, each made durable on a fake disk."""

    def __init__(self, average: float, *, one_way: bool = False) -> None:
        self.disk, self.one_way, self.version = FakeDisk(), one_way, 0
        self.thetas: list[Tensor] = []
        self.restart(average)
        payload = make_contribution("ann", random_values(SIZE, 1), pieces=FRAGMENT.pieces).payload
        self.values = seed(payload, self.making.optimizer)
        self.save()

    def restart(self, average: float) -> None:
        """Go on from the disk, with these settings."""
        self.settings = settings(average)
        self.making = Making("mean", make_outer_optimizer(self.settings.outer), self.settings.outer.average)
        self.store = open_store(self.disk)
        if (found := recover(self.store, self.settings, lambda fragment: self.making, Log("test"))) is not None:
            self.values = found[1][0].values

    def save(self) -> None:
        self.store.save(replace(make_version(self.version), values=self.values), MANIFEST)

    def make(self, versions: int) -> Run:
        for _ in range(versions):
            self.version += 1
            gradient = 0.01 * random_values(SIZE, 1000 if self.one_way else 1000 + self.version)
            merged = make_contribution("ann", gradient, pieces=FRAGMENT.pieces)
            step(self.values, FRAGMENT, [merged], outer_step=self.version, making=self.making)
            self.thetas.append(self.values.theta.double())
            self.save()
        return self

    def header(self) -> dict[str, dict[str, str]]:
        content = self.disk.content(version_name(0, self.version))
        return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # type: ignore[no-any-return]


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize(("average", "error"), [(0.9, 0.006), (0.999, 0.05)])
def test_it_is_the_formula_and_a_restart_changes_no_bit(average: float, error: float, one_way: bool) -> None:
    """One way, what each version adds is less than half of the last bit of what is kept."""
    whole, restarted = Run(average, one_way=one_way).make(150), Run(average, one_way=one_way).make(60)
    restarted.restart(average)
    restarted.make(90)
    assert whole.values.average is not None
    assert restarted.values.average is not None
    assert torch.equal(whole.values.average, restarted.values.average)

    expected = torch.zeros(SIZE, dtype=torch.float64)
    for t, theta in enumerate(whole.thetas, 1):
        expected += (1 - average) / (1 - average**t) * (theta - expected)
    off = (whole.values.averaged().double() - expected).norm() / (expected - whole.thetas[-1]).norm()
    assert off < error


def test_off_it_takes_no_byte_and_it_may_come_and_go_with_a_restart() -> None:
    run = Run(0.0).make(3)
    assert run.values.average is None
    assert (run.header().keys() >= {"average"}, run.header()["__metadata__"]["format"]) == (False, '"diloco-version-3"')

    run.restart(0.9)
    assert torch.equal(run.values.averaged(), run.values.theta), "it begins with the version that is there"
    began, kept = run.values.theta.double(), 1 - 0.1 / (1 - 0.9**4)
    run.make(1)
    theta = run.values.theta.double()
    torch.testing.assert_close(run.values.averaged().double() - theta, kept * (began - theta), rtol=0.01, atol=1e-7)
    assert (run.header()["average"]["dtype"], run.header()["__metadata__"]["format"]) == ("BF16", '"diloco-version-4"')

    run.restart(0.0)
    assert "average" not in run.make(1).header()
