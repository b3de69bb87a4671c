"""Every example, by the commands that its first lines give: it ends by itself, and says what it should."""

from __future__ import annotations

import importlib.util
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forks
from diloco_common.wire.addresses import read_address
from forks import Forked
from processes import environment, until

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:50051"
"""As the examples have it; here, the port is one that is free."""
PROGRAMS = {"diloco-server": "diloco_server", "diloco": "diloco_deploy", "torchrun": "torch.distributed.run"}
SAYS = {
    "own_loop.py": ["% of held-out points on the right spiral"],
    "resume.py": ["begins at step 0", "begins at step 200", "% of held-out points on the right spiral"],
    "ddp.py": ["% of held-out points on the right spiral"],
    "fsdp2.py": ["% of held-out points on the right spiral"],
    "hf_trainer.py": [" parameters, after "],
    "lightning_trainer.py": ["% of held-out points on the right spiral"],
    "lora.py": ["an adapter of 4608 parameters", "adapter_model.safetensors: 4.61k parameters as float32"],
}
QUICK = {"own_loop.py"}
"""In `make test`; those of islands are tried there too, mistyped (test_e2e_journeys_islands.py)."""
RULES = "own_outer_rule.py"
"""Rules of a shard: it joins none."""
ELSEWHERE = {RULES, "one_round.py", "centered_clip.py", "delayed_nesterov.py", "e3m0.py", "heloco.py", "topk64_2bit.py"}
"""What unit tests and numerics run."""
NEEDS = {
    "hf_trainer.py": ["transformers", "accelerate"],
    "lightning_trainer.py": ["lightning"],
    "lora.py": ["transformers", "peft"],
}


def commands(example: Path) -> list[list[str]]:
    """The lines of its docstring that are commands, without what they say."""
    docstring = example.read_text().split('"""')[1].replace("\\\n", "")
    lines = [line for line in docstring.splitlines() if line.startswith(("diloco", "python", "torchrun"))]
    return [shlex.split(line, comments=True) for line in lines]


def as_here(command: list[str], address: str, folder: Path) -> list[str]:
    """The command with this interpreter, this shard, and files of this test."""
    program, *arguments = command
    arguments = [a.replace(ADDRESS, address).replace("runs/", f"{folder}/") for a in arguments]
    if program == "python":
        return [sys.executable, *arguments]
    return [sys.executable, "-m", PROGRAMS[program], *arguments]


@contextmanager
def shard(command: list[str], folder: Path) -> Iterator[str]:
    """Runs the shard, forked, and gives its address."""
    file = folder / "shard.json"
    _, _, module, *arguments = as_here(command, "127.0.0.1:0", folder)
    process = Forked(module, [*arguments, f"--address-file={file}"], folder / "shard.log", environment())
    try:
        until(file.exists, "the shard listens")
        found = read_address(file)
        assert found is not None
        yield found.grpc
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def run(command: list[str], *, forked: bool) -> subprocess.CompletedProcess[str]:
    """Forked, it need not import torch anew."""
    variables = environment() | {"HF_HUB_OFFLINE": "1"}
    if forked:
        return forks.run(*command[1:], environment=variables, folder=ROOT, timeout_s=280)
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, env=variables, check=False)


def test_every_example_is_here() -> None:
    assert SAYS.keys() | ELSEWHERE == {path.name for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.gate] * (name not in QUICK)) for name in SAYS])
def test_an_example_runs_as_its_first_lines_say(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"NOT RUN: {package} is not installed (pip install 'decoupled-diloco[hf]' peft lightning)")
    serve, *others = commands(ROOT / "examples" / name)
    said = ""
    with shard(serve, tmp_path) as address:
        for command in others:
            ended = run(as_here(command, address, tmp_path), forked=name in QUICK)
            assert ended.returncode == 0, ended.stderr
            assert "Traceback" not in ended.stderr
            said += ended.stdout
    missing = [words for words in SAYS[name] if words not in said]
    assert not missing, said
