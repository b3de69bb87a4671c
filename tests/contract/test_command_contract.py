"""Commands as processes: quick to start, and quiet when their reader leaves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

QUICK = [
    ["--help"],
    ["up", "--help"],
    ["status", "--http", "127.0.0.1:1"],
    ["--version"],
    ["explain", "LATE"],
    ["checkpoint", "--help"],
    ["restore", "--help"],
    ["plan"],
    ["plan", "--params", "many"],
    ["checkpoint", "list", "/nowhere"],
    ["pull", "--out", "model"],
    ["pull", "--out", "model", "--folder", "/nowhere"],
    ["pull", "--out", "model", "--shards", "127.0.0.1:1", "--base", "/nowhere"],
    ["doctor", "--folder", "/nowhere"],
]
TRY_ALL = """
import sys
from diloco_common.command import main
for argv in ARGVS:
    try:
        main(argv)
    except SystemExit:
        pass
    if slow := {"torch", "grpc", "numpy"} & sys.modules.keys():
        sys.exit(f"{argv} imports {slow}")
"""


def test_quick_commands_import_neither_torch_nor_grpc() -> None:
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    program = TRY_ALL.replace("ARGVS", repr(QUICK))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=200)
    assert done.returncode == 0, done.stderr


PRINTS = """
from diloco_common.command import run_command
def command():
    sys.stdin.readline()  # until the reader has left
    print("x" * 1_000_000)
sys.exit(run_command(command, name="diloco"))
"""
HELPS = """
from diloco_common.command import main
sys.stdin.readline()
sys.exit(main(["--help"]))
"""


@pytest.mark.parametrize("body", [PRINTS, HELPS], ids=["print", "--help"])
def test_a_reader_that_leaves_ends_a_command_quietly(body: str) -> None:
    program = "import sys" + body
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stderr.read() == ""
        assert process.wait(timeout=200) == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("module", "name"), [("diloco_deploy", "diloco"), ("diloco_server", "diloco-server")])
def test_a_command_may_begin_with_closed_streams(module: str, name: str, closed: str) -> None:
    """As supervisors start some."""
    command = f'exec "$0" -m {module} --version {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
