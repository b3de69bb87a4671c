"""How fuzzing goes: every case follows from the name of its part, a seed and a number, so it can be made again alone.

A part draws a case, offers it to the product, and says how it was answered: by a stable code, or by "OK". Everything
else is a finding: an exception that is no `DilocoError`, no answer within `HANG_S`, more memory than `RSS_MORE`.
"""

from __future__ import annotations

import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn, TypeVar

import psutil

from diloco_common.errors import DilocoError

Case = TypeVar("Case")
HANG_S = 5.0
"""Of the processor in this process."""
STUCK_S = 60.0
"""Of time: others may be in the way, and on the wire nobody knows whose turn it is."""
RSS_MORE = 64 * 2**20


@dataclass(frozen=True)
class Finding:
    """A case that the product does not answer as it must."""

    part: str
    seed: int
    number: int
    why: str
    case: str

    def __str__(self) -> str:
        again = f"python tests/fuzz/run.py --part {self.part} --seed {self.seed} --only {self.number}"
        return f"{self.part} {self.number}: {self.why}\n    case: {self.case}\n    again: {again}"


@dataclass
class Result:
    answers: Counter[str] = field(default_factory=Counter)
    """By stable code."""
    findings: list[Finding] = field(default_factory=list)
    """The first of each kind."""
    kinds: Counter[str] = field(default_factory=Counter)
    """How many findings there are of each kind."""

    def found(self, finding: Finding, kind: str = "") -> None:
        kind = kind or finding.why
        self.kinds[kind] += 1
        if self.kinds[kind] == 1:
            self.findings.append(finding)

    @property
    def offered(self) -> int:
        return sum(self.answers.values()) + sum(self.kinds.values())


class Hang(Exception):
    """A case took too long."""


def chance_of(part: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{part}/{seed}/{number}")


def offer_all(
    part: str, draw: Callable[[random.Random], Case], answer: Callable[[Case], str], seed: int, numbers: range
) -> Result:
    """Draw cases and have them answered, one after the other, in this process. A `DilocoError` is an answer, too."""
    result, process = Result(), psutil.Process()
    before = process.memory_info().rss
    for number in numbers:
        case = draw(chance_of(part, seed, number))
        try:
            with _limited():
                result.answers[answer(case)] += 1
        except DilocoError as error:
            result.answers[error.code] += 1
        except Hang:
            result.found(Finding(part, seed, number, f"no answer within {HANG_S:g} s", shown(case)))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} in {last.filename}:{last.lineno}"
            result.found(Finding(part, seed, number, f"{place}: {str(error)[:200]}", shown(case)), place)
        more = process.memory_info().rss - before if number % 64 == 0 else 0
        if more > RSS_MORE:
            result.found(Finding(part, seed, number, f"RSS + {more / 2**20:.0f} MiB until here", shown(case)), "memory")
            before += more
    return result


@contextmanager
def _limited() -> Iterator[None]:
    """Raises Hang in what takes too long. In the main thread."""

    def hang(number: int, frame: FrameType | None) -> NoReturn:
        raise Hang

    limits = ((signal.SIGPROF, signal.ITIMER_PROF, HANG_S), (signal.SIGALRM, signal.ITIMER_REAL, STUCK_S))
    old = [signal.signal(number, hang) for number, _, _ in limits]
    for _, timer, seconds in limits:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), before in zip(limits, old, strict=True):
            signal.setitimer(timer, 0.0)
            signal.signal(number, before)


NUMBERS = (
    0, 1, 2, 3, 7, 255, 256, 65_535, 65_536, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**40 + 1,
    2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.02, 1e-320, 1e6, 1e18, 1e300, -1e300, 1.7e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", "a", "..", "../../etc/passwd", "a/b", "\x00", "a\nb", "\x1b[31mred", "a" * 65, "a" * 10_000, "é", "\u202e",
    "%s%n", "__proto__", "{}", "None", "float32", "bfloat16", "int8", "topk64_2bit", "int9",
)  # fmt: skip


def number(chance: random.Random, bits: int = 64, *, signed: bool = False) -> int:
    largest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    found = min(chance.choice(NUMBERS), largest) if chance.random() < 0.8 else chance.randrange(largest + 1)
    return -found - 1 if signed and chance.random() < 0.2 else found


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The same bytes with some of them changed, left out, doubled or cut off."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(6):
            case 0 if out:
                out[at % len(out)] ^= 1 << chance.randrange(8)
            case 1:
                out[at:at] = chance.randbytes(chance.choice((1, 2, 8, 64)))
            case 2:
                del out[at : at + chance.choice((1, 4, 100))]
            case 3:
                del out[at:]
            case 4:
                out[at:at] = out[at : at + chance.choice((1, 8, 200))]
            case _ if out:
                out[at % len(out)] = chance.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(out)


def shown(case: object) -> str:
    text = case.hex() if isinstance(case, bytes) else repr(case)
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"
