"""The step "doctor": the findings of `diloco doctor --device`, a row for each check."""

from __future__ import annotations

import time
from functools import partial

from place import Place
from report import Row, judged

from diloco_deploy.doctor import Check, State, device, run_checks

NAMES = ("device", "bandwidth", "copies", "same bits")
SOAK_S, REHEARSED_S = 45.0, 0.3


def look(name: str, place: Place) -> list[Row]:
    found = device.checks(str(place.device), SOAK_S if place.is_card else REHEARSED_S)
    chosen: list[Check] = [check for check in found if check.name == name]
    return [
        judged(f"diloco doctor: {check.name}", "", finding.state is State.OK, finding.what)
        for check, finding in run_checks(chosen, time.monotonic, place.left_s() + time.monotonic())
    ]


CASES = {name: partial(look, name) for name in NAMES}
