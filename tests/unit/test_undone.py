"""An optimizer that takes back what versions have put into the model is noticed, and no honest one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
import torch
from test_watch import Sam
from torch import Tensor, nn

from builders import TinyText, make_settings
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import LearnerPolicy
from diloco_worker.core.copies import Masters, find_copies
from diloco_worker.core.events import Arrived
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.core.undone import IN_A_ROW, ROW, STEPS, is_undone, taken_back
from lockstep import Lockstep
from optimizers import SGD, Lookahead, OnMasters, ScheduleFree
from parts import Parts, joined


class TwoSteps(Sam):
    def zero_grad(self) -> None:
        self.base.zero_grad()


def batches(seed: int) -> Iterator[Tensor]:
    """Every third token after the one before, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, TinyText.VOCABULARY, (8, 1), generator=generator)
        noise = torch.randint(0, 2, (8, 12), generator=generator).cumsum(1)
        yield (start + 3 * torch.arange(12) + noise) % TinyText.VOCABULARY


def trained(
    make: Callable[[Iterable[nn.Parameter]], object], *, masters: Callable[[object], Masters] | None = None,
    steps: int = 120, sync_every: int = 8, dtype: torch.dtype = torch.float32, num_learners: int = 2,
) -> tuple[int, float]:  # fmt: skip
    """Train some learners together. Returns at which step it was found of one (0: of none), and the last loss."""
    cluster = Lockstep(make_settings(sync={"sync_every": sync_every, "push": "int8", "pull": "bfloat16"}))
    learners = []
    for i in range(num_learners):
        model = TinyText().to(dtype)
        optimizer = make(model.parameters())
        copies = None if masters is None else find_copies(masters(optimizer), SharedSet(model))
        learners.append((cluster.join(f"learner-{i}", model, copies=copies), model, optimizer, batches(i)))
    loss = torch.zeros(())
    for step in range(1, steps + 1):
        cluster.shards[0].advance(1.0)
        for learner, model, optimizer, data in learners:
            batch = next(data)
            for _ in range(2 if isinstance(optimizer, TwoSteps) else 1):
                optimizer.zero_grad()
                loss = model.loss(batch)
                loss.backward()
                if isinstance(optimizer, TwoSteps):
                    (optimizer.second_step if optimizer.old else optimizer.first_step)()
                else:
                    optimizer.step()
            if isinstance(optimizer, TwoSteps):
                optimizer.old.clear()
            if learner.replica.laid.check():
                return step, loss.item()
            cluster.stepped(learner.learner_id, batch.numel())
        cluster.exchange()
    assert cluster.shards[0].shard.fragments[0].version >= 4
    return 0, loss.item()


HONEST: dict[str, Callable[[Iterable[nn.Parameter]], object]] = {
    "sgd": SGD,
    "adamw-fast": partial(torch.optim.AdamW, lr=0.1),
    "decay": partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.05),
    "rounded away": partial(torch.optim.SGD, lr=0.05),
    "sam": lambda parameters: TwoSteps(p := list(parameters), torch.optim.SGD(p, lr=0.3), rho=0.05),
}


@pytest.mark.parametrize("name", HONEST)
def test_of_an_optimizer_that_steps_on_the_parameters_nothing_is_found(name: str) -> None:
    dtype = torch.bfloat16 if name == "rounded away" else torch.float32
    refused, _ = trained(HONEST[name], sync_every=4, steps=60, dtype=dtype)
    assert not refused


OVERWRITE = {
    "masters": (OnMasters, torch.bfloat16, lambda o: o),
    "lookahead": (Lookahead, torch.float32, lambda o: o),
    "schedule-free": (ScheduleFree, torch.float32, lambda o: o),
}  # fmt: skip


@pytest.mark.parametrize("kind", OVERWRITE)
def test_an_optimizer_that_writes_a_copy_over_the_parameters_is_found(kind: str) -> None:
    make, dtype, _ = OVERWRITE[kind]
    refused, _ = trained(make, dtype=dtype)
    assert 0 < refused < 60


@pytest.mark.parametrize("kind", OVERWRITE)
def test_and_is_not_where_its_copies_get_versions(kind: str) -> None:
    make, dtype, masters = OVERWRITE[kind]
    refused, loss = trained(make, dtype=dtype, masters=masters)
    assert not refused
    assert loss < 2.6


def seen(rows: int, *, at: int, share: float, step: float = 0.1, laid: float = 1.0, steps: int = STEPS) -> Tensor:
    """Rows of a version of that size, of which step `at` takes back a share; the others train by steps of that size."""
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(rows, ROW, generator=generator) * laid
    before = torch.randn(rows, ROW, generator=generator)
    found = [before, before + d]
    for number in range(steps):
        moved = torch.randn(rows, ROW, generator=generator) * step
        found.append(found[-1] + moved - (share * d if number == at else 0.0))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (seen(4, at=0, share=1.0), True),
        (seen(4, at=4, share=0.5), True),
        (seen(4, at=0, share=0.0), False),
        (seen(4, at=0, share=0.2), False),  # a schedule that averages slowly
        (seen(4, at=0, share=0.0, step=10.0), False),
        (seen(4, at=0, share=1.0, step=1.0), False),  # in steps as long as the version nobody can tell
        (torch.cat([seen(2, at=0, share=1.0), seen(1, at=0, share=0.0)], 1), True),
        (torch.cat([seen(1, at=0, share=1.0), seen(4, at=0, share=0.0)], 1), False),
        (torch.cat([seen(1, at=0, share=1.0), seen(2, at=0, share=0.0, laid=0.0)], 1), True),  # these say nothing
        (seen(4, at=0, share=1.0, laid=0.0), False),
    ],
)  # fmt: skip
def test_a_version_is_undone_where_one_step_is_its_inverse(samples: Tensor, expected: bool) -> None:
    assert is_undone(*taken_back(samples.flatten(1)).tolist()) is expected


def test_a_step_of_a_learner_says_it_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    parts, model = Parts(), nn.ParameterList([nn.Parameter(torch.zeros(ROW))])
    learner = parts.learner(model)
    digest, policy = cut(Replica(model).specs, 1, 1).digest, LearnerPolicy(1, "float32", "float32")
    learner._inbox.put(joined(5, policy, digest=digest))
    learner._inbox.put(Arrived(0, 0, 5, torch.zeros(ROW), 0))
    assert learner.begin()
    master = model[0].detach().clone()

    def train_on_the_master() -> None:
        for version in range(1, IN_A_ROW + 1):
            learner._inbox.put(Arrived(0, version, 5, torch.full((ROW,), float(version)), 0))
            for _ in range(STEPS):
                with torch.no_grad():
                    model[0].copy_(master.add_(0.01))
                learner.step(tokens=1)
        learner.poll()
        learner.step(tokens=1)

    train_on_the_master()
    assert caplog.text.count("inner steps undo one version") == 1
    assert "join(masters=optimizer)" in caplog.text
    assert "join(after_version=f)" in caplog.text
    assert "code=VERSION_UNDONE" in caplog.text
    assert learner.status()["versions_undone"] == IN_A_ROW
