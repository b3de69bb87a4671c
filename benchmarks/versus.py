"""The comparison that users make: the same training by torch DDP, torchft, hivemind and ours, over real, thin links.

    sudo .venv/bin/python benchmarks/versus.py                                     # what is missing, then the page
    sudo .venv/bin/python benchmarks/versus.py --only ours,ddp --links 100mbit --cases plain --again
    sudo .venv/bin/python benchmarks/versus.py --longer --only ours --links 100mbit --seed 1       # 200 s, another seed
    .venv/bin/python benchmarks/versus.py --page                                   # only the page and the picture

4 workers train a small GPT on real text, each on a machine of its own (a network namespace behind a link of its own).
Needs root, iproute2, nsenter and unshare, and the peers, each in an environment of its own:

    for peer in torchft hivemind; do python -m venv VENVS/$peer && VENVS/$peer/bin/pip install torch==2.13.0 $peer; done
    ... versus.py --venvs VENVS

DDP and ours run under the Python of this script. A run takes about a minute; a peer that is not installed is skipped.
Results are lines in benchmarks/results/versus.jsonl, one for each system, link, case and seed; the newest one counts.
Those of longer runs are in versus_longer.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import versus_page
from versus_cell import CASES, SYSTEMS, Cell, Times, run_cell
from versus_machines import LINKS, NotPossible

RESULTS = Path(__file__).resolve().parent / "results" / "versus.jsonl"
LONGER = RESULTS.with_name("versus_longer.jsonl")
LONGER_S = 200.0
MODULES = {
    "ours": "diloco_worker",
    "ddp": "torch",
    "torchft": "torchft",
    "hivemind": "hivemind",
    "alone": "torch",
    "mean": "diloco_worker",
}
CORES = 2
"""All processes of a run share this many cores."""


def main() -> int:
    args = _arguments()
    if not args.page:
        if problem := _problem():
            print(problem, file=sys.stderr)
            return 2
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that machines and links are taken away
        try:
            with _own_share(beside=args.beside):
                _run_missing(args)
        except NotPossible as error:
            print(f"this machine does not let us make machines and links: {error}", file=sys.stderr)
            return 2
    if not args.no_page:
        usual = read(RESULTS if args.longer else args.results)
        versus_page.write([r for r in usual if r["seed"] == 0], read(LONGER))
    return 0


def _run_missing(args: argparse.Namespace) -> None:
    done = set() if args.again else {Cell(r["system"], r["link"], r["case"], r["seed"]) for r in read(args.results)}
    text = _text()
    for cell in (Cell(s, link, case, args.seed) for link in args.links for case in args.cases for s in args.only):
        python = _python(cell.system, args.venvs)
        if cell in done or python is None:
            print(f"{cell.name}: {'done before' if cell in done else 'not installed, see --help'}", flush=True)
            continue
        result = run_cell(cell, python, args.times, text, args.keep and args.keep / cell.name.replace("/", "-"))
        result |= {"when": datetime.now(UTC).isoformat(timespec="seconds"), "times": asdict(args.times)}
        with args.results.open("a") as out:
            out.write(json.dumps(result) + "\n")
        print(versus_page.line(result), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The newest result of each cell, in the order of links, cases, systems and seeds."""
    lines = path.read_text().splitlines() if path.exists() else []
    newest = {(r["link"], r["case"], r["system"], r["seed"]): r for r in ({"seed": 0} | json.loads(x) for x in lines)}
    order = [(link, case, system) for link in LINKS for case in CASES for system in SYSTEMS]
    return [newest[key] for key in sorted(newest, key=lambda key: (order.index(key[:3]), key[3]))]


def _arguments() -> argparse.Namespace:
    def several(known: Any) -> Any:
        def parse(text: str) -> list[str]:
            names = text.split(",")
            if unknown := set(names) - set(known):
                raise argparse.ArgumentTypeError(f"no such thing: {', '.join(unknown)}; there are {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser(description="Compare ours with its peers over real links.")
    parser.add_argument("--only", type=several(SYSTEMS), default=list(SYSTEMS), help=",".join(SYSTEMS))
    parser.add_argument("--links", type=several(LINKS), default=list(LINKS), help=",".join(LINKS))
    parser.add_argument("--cases", type=several(CASES), default=list(CASES), help=",".join(CASES))
    parser.add_argument("--venvs", type=Path, help="folder with an environment for each peer, VENVS/torchft ...")
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    parser.add_argument(
        "--seconds", type=float, help=f"measured in each run; {Times.measured:g}, or {LONGER_S:g} longer"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial values and the text")
    parser.add_argument("--longer", action="store_true", help="longer runs, with results of their own")
    parser.add_argument("--away", type=float, default=Times.away, help="seconds until the killed worker comes back")
    parser.add_argument("--results", type=Path, help="file with a line for each run")
    parser.add_argument("--keep", type=Path, help="copy logs and step times of each run into this folder")
    parser.add_argument("--page", action="store_true", help="run nothing, write page and picture")
    parser.add_argument("--no-page", action="store_true", help="write neither page nor picture")
    parser.add_argument("--beside", action="store_true", help="leave other work on this machine its share: to try it")
    args = parser.parse_args()
    args.times = Times(measured=args.seconds or (LONGER_S if args.longer else Times.measured), away=args.away)
    args.results = args.results or (LONGER if args.longer else RESULTS)
    return args


def _problem() -> str:
    if os.geteuid() != 0:
        return "versus.py makes network namespaces and shapes links, which only root may: run it with sudo"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if not _which(tool)]
    return f"{', '.join(missing)} not found: install iproute2 and util-linux" if missing else ""


def _which(tool: str) -> bool:
    return any(os.access(Path(folder, tool), os.X_OK) for folder in os.get_exec_path())


@contextmanager
def _own_share(*, beside: bool) -> Iterator[None]:
    """All systems have the same two cores, on any machine. Other work on them has to wait, where cgroups allow it; not
    `beside` work that matters as much."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    shares, weights = ("2048", "200") if beside else ("100000", "10000")
    for root, weight in (("/sys/fs/cgroup/cpu", ("cpu.shares", shares)), ("/sys/fs/cgroup", ("cpu.weight", weights))):
        group = Path(root, f"versus-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            Path(group, weight[0]).write_text(weight[1])
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
            yield
        except OSError as error:
            print(f"no share of our own ({error}): other work on this machine will show", file=sys.stderr)
            yield
        finally:
            Path(root, "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()
        return
    yield


def _python(system: str, venvs: Path | None) -> str | None:
    own = venvs and venvs / system / "bin" / "python"
    python = str(own.absolute()) if own and own.exists() else sys.executable
    found = subprocess.run([python, "-c", f"import {MODULES[system]}"], capture_output=True, check=False)
    return python if found.returncode == 0 else None


def _text() -> tuple[bytes, bytes]:
    from diloco_worker.builtin.data import STDLIB, load_corpus

    corpus = load_corpus(STDLIB, held_out=0.05)
    return corpus.train.numpy().tobytes(), corpus.held_out.numpy().tobytes()


if __name__ == "__main__":
    sys.exit(main())
