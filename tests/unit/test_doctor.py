"""The verdicts of `diloco doctor`: what a measurement means, and that no check harms another."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco_common.errors import CannotConnect
from diloco_common.settings import Settings, ShardSettings
from diloco_common.wire import rpc
from diloco_deploy.codes import CODES
from diloco_deploy.doctor import (
    Check,
    CheckedLine,
    Door,
    Known,
    ReportLine,
    command,
    device,
    failure,
    machine,
    ok,
    run_checks,
    shards,
)
from diloco_deploy.doctor.machine import PlannedShard, Written

SHARD = PlannedShard(
    params=1e8, fragments=24, learners=8, push="int8", pull="bfloat16", outer="nesterov", every=24, step_s=1.0,
    checkpoints=0,
)  # fmt: skip
"""A version of a fragment has 33 MB."""


def verdict(finding: ReportLine) -> tuple[str, str]:
    return finding.state.value, finding.code


def test_every_code_that_the_doctor_says_is_explained(repository: Path) -> None:
    said = {
        code
        for path in (repository / "deploy/diloco_deploy/doctor").glob("*.py")
        for code in re.findall(r'"([A-Z]{3,}_[A-Z_]+)"', path.read_text(encoding="utf-8"))
    }
    assert len(said) > 15
    assert said - set(CODES) == set()


NOW = datetime(2026, 11, 22, tzinfo=UTC)
AVERAGING = SHARD._replace(companions_every=1)


def room(free: float, used: float = 0.0, shard: PlannedShard = SHARD, checkpoints: int = 0) -> ReportLine:
    """8 bytes x (2 x 10^8 + 2 x 4.2 x 10^6) = 1.67 GB; averaging takes 4 bytes beside 6: 2.1 GB."""
    return machine.enough_room(Path("x"), free, used, shard._replace(checkpoints=checkpoints))


@pytest.mark.parametrize(
    ("found", "state", "code"),
    [
        (shards.round_trip("ps-0:1", 0.7), "warning", "LINK_FAR"),
        (shards.clock("ps-0:1", 0.2), "ok", "OK"),
        (shards.clock("ps-0:1", -30.0), "warning", "CLOCK_SKEWED"),
        # A certificate is renewed before it ends.
        (shards.validity("it", NOW + timedelta(days=13), NOW), "warning", "CERTIFICATE_ENDS_SOON"),
        (shards.validity("it", NOW + timedelta(days=15), NOW), "ok", "OK"),
        (machine.fast_enough(Path("x"), Written(1.5, 8 << 20), None), "warning", "DISK_SLOW"),  # whatever the model
        (machine.fast_enough(Path("x"), Written(0.15, 8 << 20), AVERAGING), "warning", "DISK_SLOW"),  # 75 % of H steps
        (room(2e9), "ok", "OK"),
        (room(1e9), "failure", "DISK_SMALL"),
        (room(2e9, shard=AVERAGING), "failure", "DISK_SMALL"),
        (machine.enough_files(1 << 20, ShardSettings()), "ok", "OK"),
        (machine.enough_files(256, ShardSettings()), "failure", "FILES_FEW"),
        (machine.enough_memory(1e9, SHARD), "failure", "MEMORY_SHORT"),
        (machine.enough_memory(3e9, SHARD._replace(companions_every=4)), "failure", "MEMORY_SHORT"),
    ],
)
def test_what_a_measurement_means(found: ReportLine, state: str, code: str) -> None:
    assert verdict(found) == (state, code)


@pytest.mark.parametrize("clock", ["", "noon", "nan", "-inf"])
def test_a_shard_that_tells_no_time_is_one_finding(clock: str) -> None:
    door = Door("ps-0:1", "local")
    assert rpc.hello_of([(rpc.CLOCK_KEY, clock), (rpc.PACKAGE_KEY, "1.0")] if clock else []) is None
    assert verdict(shards.clock_of(door, Known())) == ("warning", "CLOCK_UNKNOWN")
    assert shards.version(door, Known(), "1.0") == []


def test_a_link_that_somebody_laid_is_not_written_through(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "data"
    victim.write_text("precious")
    folder.mkdir()
    for name in ("doctor-", "probe", "probe.tmp", f"doctor-{os.getpid()}", f"doctor-{os.getpid()}.tmp"):
        (folder / name).symlink_to(victim)
    before = sorted(folder.iterdir())
    assert machine.speed(folder, None, time.monotonic).code in ("OK", "DISK_SLOW")
    assert victim.read_text() == "precious"
    assert sorted(folder.iterdir()) == before


def test_a_cgroup_is_less_than_its_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert machine.available_bytes(meminfo, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("2048000\n")
    (tmp_path / "memory.current").write_text("48000\n")
    assert machine.available_bytes(meminfo, tmp_path) == 2_000_000


def checks(*looks: Callable[[], ReportLine], needs: tuple[str, ...] = ()) -> list[Check]:
    return [Check(f"check {i}", "here", 5.0, look, needs if i else ()) for i, look in enumerate(looks)]


def codes_of(some: list[Check], ends_at: float = 100.0) -> list[str]:
    return [found.finding.code for found in run_checks(some, lambda: 0.0, ends_at)]


def test_a_check_that_breaks_is_one_finding() -> None:
    def breaks() -> ReportLine:
        raise ZeroDivisionError("oh")

    def refuses() -> ReportLine:
        raise CannotConnect("nobody there")

    assert codes_of(checks(breaks, refuses, lambda: ok("fine"))) == ["CHECK_FAILED", "CANNOT_CONNECT", "OK"]


def test_a_check_that_hangs_is_left_behind() -> None:
    import threading

    never = threading.Event()

    def hangs() -> ReportLine:
        never.wait(30)
        return ok("late")

    assert codes_of(checks(hangs, lambda: ok("fine")), ends_at=0.1) == ["CHECK_TIMED_OUT", "OK"]
    never.set()


def test_a_check_without_what_it_needs_is_skipped() -> None:
    looks = (lambda: failure("PORT_CLOSED", "shut"), lambda: ok("fine"))
    assert codes_of(checks(*looks, needs=("check 0",))) == ["PORT_CLOSED", "SKIPPED"]


def test_the_words_of_a_shard_do_not_steer_the_terminal(monkeypatch, capsys) -> None:
    finding = failure("DISK_SLOW", "the shard is \x1b]0;mine\x07\x1b[2J", "do\nok       all is well")
    monkeypatch.setattr(command, "look", lambda _: [CheckedLine(Check("disk", "", 1.0, lambda: finding), finding)])
    command.examine(command.Patient(Settings()))
    first, second, *_ = capsys.readouterr().out.split("\n")
    assert first.isprintable()
    assert second.endswith(r"do\nok       all is well")


CPU = torch.device("cpu")


def passing(seconds: float) -> Callable[[], float]:
    """A clock that goes on by so many seconds each time that somebody looks."""
    now: Iterator[int] = count()
    return lambda: next(now) * seconds


def flipped(which: int, in_tensor: int) -> Callable[[], Sequence[Tensor]]:
    """Real work, but the lowest bit of one number is wrong the which-th time."""
    work, times = device.Work(CPU).run, count()

    def run() -> Sequence[Tensor]:
        came_out = work()
        if next(times) == which:
            came_out[in_tensor].view(torch.uint8).view(-1)[12] ^= 1
        return came_out

    return run


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (device.Work(CPU).run, "OK"),
        (flipped(3, 0), "DEVICE_WRONG"),  # in a matrix product
        (flipped(1, 1), "DEVICE_WRONG"),  # in what the optimizer has done
    ],
    ids=["a sound device", "a product", "an optimizer step"],
)
def test_a_bit_that_flips_is_found(work: Callable[[], Sequence[Tensor]], code: str) -> None:
    found = device.same_bits(work, 4.0, passing(1.0))
    assert found.code == code
    assert found.figures["times"] == 5


def test_a_cpu_is_looked_at_as_a_card_is() -> None:
    found = [check.look() for check in device.checks("cpu", soak_s=0.0)]
    assert [finding.code for finding in found] == ["OK"] * 4
    assert found[1].figures["bytes_per_s"] > 0


def test_a_device_that_is_not_there_is_named() -> None:
    (check,) = device.checks("nowhere")
    assert check.look().code == "DEVICE_MISSING"
