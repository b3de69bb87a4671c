"""What people get wrong, in processes: one clear line, no traceback, and its exit code. More: unit/test_mistakes.py."""

from __future__ import annotations

import pytest

from processes import run_module


@pytest.mark.parametrize("program", [["diloco_deploy", "up"], ["diloco_server"], ["diloco_demo"]], ids=lambda p: p[0])
def test_a_process_ends_with_one_line_and_its_exit_code(program: list[str]) -> None:
    ended = run_module(*program, "--set=sync.quorm=2", own_interpreter=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "sync.quorm" in line
    assert "did you mean sync.quorum" in line
