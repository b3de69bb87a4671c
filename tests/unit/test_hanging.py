"""Which processes of `diloco up` hang: by silence, or by their own word."""

from __future__ import annotations

import pytest

from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.worker import WorkerMetrics
from diloco_common.wire.messages import Pulse
from diloco_deploy.run.supervisor import Hanging
from diloco_worker.core.connection import Caller
from diloco_worker.shell.telemetry import LearnerTelemetry


@pytest.mark.parametrize(
    ("limit_s", "looks", "heard", "hung_at"),
    [
        (60.0, range(100), {}, 61),  # never heard: counted from when its ports are known
        (60.0, range(150), {50: False}, 111),
        (60.0, range(50), {}, None),
        (0.0, range(1000), {5: True}, None),  # off
        (60.0, range(20), {7: True}, 7),  # it says so itself
        (60.0, [0, 1, 1000, 1001, 1040], {}, None),  # we were stopped ourselves, or the machine slept
        (60.0, [0, 1, 1000, *range(1001, 1100)], {}, 1060),
    ],
)
def test_a_process_hangs_by_silence_or_by_its_own_word(
    limit_s: float, looks: list[int], heard: dict[int, bool], hung_at: int | None
) -> None:
    hanging = Hanging(limit_s)
    for now in looks:
        if now in heard:
            hanging.heard("worker-0", now, is_hung=heard[now])
        if hanging.look(["worker-0"], now):
            assert now == hung_at
            return
    assert hung_at is None


def test_a_new_process_begins_with_the_whole_time() -> None:
    hanging = Hanging(3.0)
    for now in range(5):
        found = hanging.look(["worker-0"], now)
    assert found
    assert not hanging.look([], 5.0)  # it was killed
    assert not any(hanging.look(["worker-0"], 6.0 + now) for now in range(3))


def test_a_worker_hangs_if_it_trains_and_ends_no_step() -> None:
    now = [0.0]
    telemetry = LearnerTelemetry(Caller("run", "worker-0", "process"), lambda: now[0], WorkerMetrics(), Log("worker-0"))
    now[0] = 1e6  # it waits for shards for as long as that takes
    assert telemetry.health == (True, "joining")
    telemetry.trains()
    now[0] += telemetry.hung_s - 1.0
    assert telemetry.health[0]
    now[0] += 2.0
    assert telemetry.health == (False, "no inner step has ended for 1801 s")
    assert telemetry.status(Pulse(0, 0), ())["hung"]
    telemetry.hung_s = 0.0
    assert telemetry.health[0]
