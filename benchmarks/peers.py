"""The cost of one outer synchronisation of N float32 parameters among L learners in other systems, over loopback.

    python benchmarks/peers.py --params 100e6 --learners 4 --rounds 3 --json out.json
    python benchmarks/peers.py --peers gloo,torchft --venvs /path/to/venvs      # a venv per peer: venvs/torchft ...

A peer that is not installed is listed with the line that installs it. Each peer has its own script (peer_NAME.py). It
runs under VENVS/NAME/bin/python if that exists, else under the Python of this script. A peer that fails or exceeds its
time limit is listed with its last message. All processes of a script end with it.

Exits with 1 if no peer could be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
STARTUP_S = 90.0
"""Part of each limit, for imports, connections and the warm-up round."""


@dataclass(frozen=True)
class Peer:
    name: str
    module: str
    """If it can be imported, the peer is installed."""
    distribution: str
    install: str
    limit_s_per_million: float
    """Generous: seconds per round and million parameters for 4 learners."""


PEERS = [
    Peer("gloo", "torch.distributed", "torch", "pip install torch", 0.2),
    Peer("torchft", "torchft", "torchft", "pip install torchft torch", 0.4),
    Peer("hivemind", "hivemind", "hivemind", "pip install hivemind torch", 0.8),
    Peer("flower", "flwr", "flwr", "pip install flwr numpy", 1.5),
    Peer("nvflare", "nvflare", "nvflare", "pip install nvflare numpy", 1.5),
]


@dataclass(frozen=True)
class Outcome:
    """The result of one peer."""

    name: str
    state: str
    """"measured", "not installed", "failed" or "too slow"."""
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    """One per round."""
    what: str = ""
    """What a round of this peer consists of; if it was not measured, why not."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds_median": median(self.seconds) if self.seconds else None}


def measure(peer: Peer, venvs: Path | None, params: int, learners: int, rounds: int) -> Outcome:
    """Run one peer's script."""
    python = _python_of(peer, venvs)
    version = _installed_version(peer, python)
    if version is None:
        return Outcome(peer.name, "not installed", what=peer.install)
    script = [python, str(HERE / f"peer_{peer.name}.py")]
    options = [f"--params={params}", f"--learners={learners}", f"--rounds={rounds}"]
    limit_s = STARTUP_S + peer.limit_s_per_million * params / 1e6 * (rounds + 1) * max(1.0, learners / 4)
    with tempfile.TemporaryDirectory() as folder, Path(folder, "err").open("w+") as err:
        with _own_group([*script, *options], folder, err) as process:
            try:
                out, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return Outcome(peer.name, "too slow", version, what=f"ended after {limit_s:.0f} s")
        if process.returncode == -signal.SIGKILL:
            return Outcome(peer.name, "failed", version, what="killed, as the kernel does when memory is short")
        if process.returncode != 0:
            err.seek(0)
            last = [line for line in err.read().splitlines() if line.strip()][-1:]
            return Outcome(peer.name, "failed", version, what=f"exit code {process.returncode}: {''.join(last)[:200]}")
    found = json.loads(out.splitlines()[-1])
    if len(found["seconds"]) < rounds:
        return Outcome(peer.name, "failed", version, what=f"{len(found['seconds'])} of {rounds} rounds were measured")
    return Outcome(peer.name, "measured", version, found["seconds"], found["what"])


def _python_of(peer: Peer, venvs: Path | None) -> str:
    own = venvs / peer.name / "bin" / "python" if venvs else None
    return str(own.absolute()) if own and own.exists() else sys.executable


def _installed_version(peer: Peer, python: str) -> str | None:
    """None: not installed there."""
    ask = (
        f"import importlib.util as u; from importlib.metadata import version as v; "
        f"print(v({peer.distribution!r}) if u.find_spec({peer.module!r}) else '')"
    )
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, cwd=HERE, timeout=STARTUP_S)
    return asked.stdout.strip() or None if asked.returncode == 0 else None


@contextmanager
def _own_group(command: list[str], folder: str, err: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command in its own folder and process group. At the end, kill the whole group."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "PYTHONPATH": str(HERE)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def show(outcome: Outcome) -> str:
    """One line for a person."""
    name = f"{outcome.name:<9} {outcome.version:<14}"
    if outcome.state != "measured":
        return f"{name} {outcome.state}: {outcome.what}"
    s = outcome.seconds
    return f"{name} {median(s):7.2f} s  ({min(s):.2f} to {max(s):.2f})   {outcome.what}"


def main() -> int:
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description="Measure what one synchronisation costs with other systems.")
    parser.add_argument("--params", type=lambda text: int(float(text)), default=100_000_000, help="as in 100e6")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=names, help=",".join(names))
    parser.add_argument("--venvs", type=Path, help="folder with a virtual environment per peer, named as the peers")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    if unknown := set(args.peers) - set(names):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(names)}")

    print(f"{args.params / 1e6:g} M float32 parameters, {args.learners} learners, median of {args.rounds} rounds")
    outcomes = []
    for peer in PEERS:
        if peer.name in args.peers:
            outcomes.append(measure(peer, args.venvs, args.params, args.learners, args.rounds))
            print(show(outcomes[-1]), flush=True)
    if args.json:
        peers = [outcome.as_json() for outcome in outcomes]
        found = {"params": args.params, "learners": args.learners, "rounds": args.rounds, "peers": peers}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if any(outcome.seconds for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
