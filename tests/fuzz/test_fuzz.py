"""A part of what `make fuzz` offers: no crash, no hang, no traceback, and every message answered with a stable code."""

from __future__ import annotations

import contextlib
from pathlib import Path

import messages
import pytest
import run
from fuzzing import Result
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from diloco_common.errors import BadRequest

SEED = 20261122
COUNTS = {
    "answers": 600, "calls": 300, "http": 120, "messages": 400, "versions": 300, "manifests": 100,
    "settings": 100,
}  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("part", COUNTS)
def test_everything_from_outside_is_answered_with_a_stable_code(part: str, tmp_path: Path) -> None:
    _, offer = run.parts(tmp_path)[part]
    result: Result = offer(SEED, range(COUNTS[part]))
    print(f"{result.offered} messages with seed {SEED}: {dict(result.answers)}")
    found = "\n".join(str(finding)[:2000] for finding in result.findings)
    assert not found, found


@pytest.mark.parametrize("kind", messages.READERS | messages.ANSWERS, ids=lambda kind: kind.DESCRIPTOR.name)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_bad_request(kind: type[Message], data: bytes) -> None:
    with contextlib.suppress(BadRequest):
        (messages.READERS | messages.ANSWERS)[kind](data)
