"""Proves and measures a learner on an accelerator: `make gpu` (docs/gpu.md).

    python benchmarks/gpu --device cuda --minutes 8 --out runs/gpu
    python benchmarks/gpu --device cpu --minutes 1 --out g            # the rehearsal
    python benchmarks/gpu --only cost                                 # one step

Each step is a process of its own. When its time is over, it is killed with everything that it started (plan.py). A case
that fails or hangs ends its process, since an error on a device spoils later cases. The next process goes on after that
case. Exit code 1 if a row failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ("protos", "common", "server", "worker", "simulator", "deploy", "benchmarks")
sys.path[:0] = [str(HERE), *(str(ROOT / folder) for folder in (*SOURCES, "tests", "tests/contract"))]

from plan import STEPS, bounds  # noqa: E402
from report import CUT_OFF, FAIL, NOT_HERE, NotHere, Record, Row, cut_off, page, results, rows_of, table  # noqa: E402

FAILED = 3
"""Exit code of a process that ends because a case failed."""
PAGE = ROOT / "docs/gpu.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or torch's name of another accelerator")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all steps (default: 8; 1 or more)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="JSON and logs")
    parser.add_argument("--only", choices=STEPS, metavar="STEP", help=f"run only one of {', '.join(STEPS)}")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md, from the JSON in --out")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--ends-at", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.minutes < 1:
        parser.error("--minutes: 1 or more")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.step:
        return run_cases(args)
    if args.page:
        write_page(args.out)
        return 0
    run_steps(args)
    print(table(args.out))
    found = results(args.out)
    if args.device != "cpu" and any(of["machine"] for of in found.values()):  # it ran on a card
        write_page(args.out)
    return int(any(row.result == FAIL for of in found.values() for row in rows_of(of)))


def write_page(folder: Path) -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), folder), encoding="utf-8")


def run_steps(args: argparse.Namespace) -> None:
    limits = bounds(args.minutes) if args.only is None else {args.only: 60 * args.minutes}
    for name in limits:  # with --only, the results of the other steps stay
        (args.out / f"{name}.json").unlink(missing_ok=True)
    ends_at = time.time()
    for name, seconds in limits.items():
        began, ends_at = time.monotonic(), ends_at + seconds  # the next step may use the time that a step leaves over
        if STEPS[name].needs_card and args.device == "cpu":
            Record(args.out / f"{name}.json", name, [], {}).end(name, [Row("all of it", "", NOT_HERE)], 0.0)
            continue
        run_step(name, args, ends_at)
        print(f"gpu: {name}: {time.monotonic() - began:.1f} s of {seconds:.0f} and what was left over", flush=True)


def run_step(name: str, args: argparse.Namespace, ends_at: float) -> None:
    """Start processes until all cases have run, the time is over, or a process ends without having begun a case."""
    own = [f"--device={args.device}", f"--minutes={args.minutes}", f"--out={args.out}"]
    command = [sys.executable, str(HERE), *own, f"--step={name}", f"--ends-at={ends_at}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **STEPS[name].environment}
    path, code, known, before = args.out / f"{name}.json", FAILED, b"", b"-"
    with (args.out / f"{name}.log").open("wb") as log:
        while code != 0 and time.time() < ends_at and known != before:
            before = known
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            try:
                code = process.wait(max(0.0, ends_at - time.time()))
            except subprocess.TimeoutExpired:
                code = 0
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its shards
            process.wait()
            known = path.read_bytes() if path.exists() else b""
    is_over = time.time() >= ends_at
    if is_over:
        cut_off(path)
    if not known:
        row = Row(name, "", CUT_OFF if is_over else FAIL, f"no case was begun; {name}.log says why")
        Record(path, name, [], {}).end(name, [row], 0.0)


def run_cases(args: argparse.Namespace) -> int:
    """Run the cases of a step, in its process. Returns the exit code."""
    from place import Place

    step = STEPS[args.step]
    os.environ.update(WHAT_WORKS_ON=args.device, WHAT_WORKS_SEED=str(step.seed))  # tests/contract/what_works
    place = Place.of(args.device, step.seed, args.ends_at)
    cases = import_module(step.module).CASES
    record = Record(args.out / f"{args.step}.json", args.step, cases, machine(place))
    for case in record.left():
        faulthandler.dump_traceback_later(step.case_s, exit=True)
        began = time.monotonic()
        try:
            rows = cases[case](place)
        except NotHere as error:
            rows = [Row(case, result=NOT_HERE, figure=str(error))]
        except Exception as error:
            traceback.print_exc()
            rows = [Row(case, result=FAIL, figure=f"{type(error).__name__}: {error}".splitlines()[0][:200])]
        faulthandler.cancel_dump_traceback_later()
        record.end(case, rows, time.monotonic() - began)
        if any(row.result == FAIL for row in rows):
            os._exit(FAILED)  # do not wait for threads of the failed case
    return 0


def machine(place: Any) -> dict[str, Any]:
    import torch

    return {
        "card": place.card(), "torch": torch.__version__, "Python": platform.python_version(),
        "cores": os.cpu_count(), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(),
    }  # fmt: skip


def commit() -> str:
    """The commit of this repository. If git does not know it, the one that pack.py wrote down."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        packed = ROOT / ".gpu/COMMIT"
        return packed.read_text().strip() if packed.exists() else "unknown"


if __name__ == "__main__":
    sys.exit(main())
