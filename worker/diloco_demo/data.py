"""The built-in data: training text, held-out text, and a learner's stream over the training text.

A hash of its name decides whether a file is held out, so all learners hold out the same files. If there is a single
file, or too few to hold one out, every n-th region of the text is held out instead.

Learners come and go, and nobody knows how many there will be. So each learner walks over the whole training text in its
own order, as far as it gets before the run ends: a shuffle of windows, seeded by the run's seed, the learner id and the
pass. A learner that joins or leaves does not change the order of the others.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diloco_common.errors import DataError

_Bytes = npt.NDArray[np.uint8]

STDLIB = "stdlib"
CORPUS_BYTES_MAX = 4 << 30
"""Maximum size of a corpus. Each worker keeps it in memory."""
REGION_BYTES_MAX = 64 << 10
"""A single file is cut into regions of at most this many bytes, some of which are held out."""
STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders of the standard library that are skipped: installed packages, generated tables, manuals and tests. One
generated file could be most of the held-out text. Many Python distributions, such as slim container images, have no
tests; without them, learners on different machines hold out the same files."""


@dataclass(frozen=True)
class Corpus:
    """Text for training and text for evaluation, uint8 [n] each. No byte of a file is in both."""

    train: Tensor
    held_out: Tensor
    files: int


HELD_OUT = 0.05
"""Share of the files (`data.source`) that is held out for evaluation."""


def load_corpus(source: str, held_out: float = HELD_OUT) -> Corpus:
    """Read `stdlib`, a file, or every file below a folder except hidden ones, text or binary.

    `held_out` is the share of the files kept from training (or of the regions, if there are too few files). Unreadable
    files in a folder are skipped. Raises DataError if there is nothing to read, or too little or too much.
    """
    if source == STDLIB:
        root, paths = _stdlib()
    else:
        root = Path(source).expanduser()
        if root.is_file():
            return _split_file(root, held_out)
        if not root.is_dir():
            raise DataError(f"data.source: there is no file or folder {str(root)!r}; give one, or {STDLIB!r}")
        paths = _files_below(root)
    return _split_files(root, sorted(paths, key=lambda p: p.relative_to(root).as_posix()), held_out)


def is_held_out(name: str, held_out: float) -> bool:
    """Whether a file is kept from training. `name`: relative to the source, with forward slashes."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < held_out * 2**64


class TokenStream:
    """One learner's endless, seeded stream of batches; `position` identifies its place exactly.

    A pass visits windows of `context` + 1 bytes, `context` apart, each once, shuffled; the next pass shuffles
    anew and shifts the windows. The batch at a position is a pure function of the arguments and the position.
    """

    def __init__(
        self, text: Tensor, *, learner_id: str, seed: int, context: int, batch: int, position: int = 0
    ) -> None:
        """`text` is uint8 [n]. Raises DataError if it holds fewer than two windows."""
        self.position = position
        """Windows drawn since the start; set it to resume."""
        self._text = text
        self._key = f"{seed}/{learner_id}"
        self._context = context
        self._batch = batch
        self._windows = len(text) // context - 1  # one less than would fit leaves room for the shift
        if self._windows < 1:
            raise DataError(
                f"the training text has {len(text)} bytes, but a context of {context} needs at least "
                f"{2 * context}: give more data, or a smaller model.context"
            )
        self._pass = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs, and targets (the inputs shifted by one byte), int64 [batch, context], on the CPU."""
        starts = torch.stack([self._start(self.position + i) for i in range(self._batch)])
        windows = self._text[starts[:, None] + torch.arange(self._context + 1)].long()
        self.position += self._batch
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def starts(self, count: int) -> Tensor:
        """Start offsets of the first `count` windows: int64 [count]."""
        passes = -(-count // self._windows)
        return torch.cat([self._shuffle(number) for number in range(passes)])[:count]

    def _start(self, position: int) -> Tensor:
        number, index = divmod(position, self._windows)
        if number != self._pass:
            self._pass, self._starts = number, self._shuffle(number)
        return self._starts[index]

    def _shuffle(self, number: int) -> Tensor:
        """Start offsets of a pass's windows, int64 [windows], in the order of visits."""
        digest = hashlib.sha256(f"{self._key}/{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        shift = torch.randint(self._context, (), generator=generator)
        return torch.randperm(self._windows, generator=generator) * self._context + shift


def _stdlib() -> tuple[Path, Iterator[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    return root, (path for path in _files_below(root, STDLIB_SKIPPED) if path.suffix == ".py")


def _files_below(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _split_files(root: Path, paths: list[Path], held_out: float) -> Corpus:
    """Split by a hash of the names. If there are too few files, join them and split the text by regions."""
    texts: list[tuple[str, _Bytes]] = []
    total = 0
    for path in paths:
        text = _read(path, CORPUS_BYTES_MAX - total, root)
        if text is not None and len(text):
            texts.append((path.relative_to(root).as_posix(), text))
            total += len(text)
    if not texts:
        raise DataError(f"{str(root)!r} holds no readable file that is not empty: give another folder, or a file")
    kept = [text for name, text in texts if is_held_out(name, held_out)]
    rest = [text for name, text in texts if not is_held_out(name, held_out)]
    if min(sum(map(len, kept)), sum(map(len, rest))) < 2:
        return _split_regions(root, np.concatenate(kept + rest), held_out, len(texts))
    return Corpus(_tensor(rest), _tensor(kept), len(texts))


def _split_file(path: Path, held_out: float) -> Corpus:
    text = _read(path, CORPUS_BYTES_MAX, path)
    if text is None:
        raise DataError(f"{str(path)!r} cannot be read: check its permissions, or give another file")
    return _split_regions(path, text, held_out, 1)


def _split_regions(source: Path, text: _Bytes, held_out: float, files: int) -> Corpus:
    """Hold out the middle one of every n = 1 / held_out regions of one text."""
    every = max(2, round(1 / held_out))
    if len(text) < 4 * every:
        raise DataError(f"{str(source)!r} holds {len(text)} bytes, too little for training: give more data")
    size = min(REGION_BYTES_MAX, len(text) // every)
    regions = [text[begin : begin + size] for begin in range(0, len(text), size)]
    return Corpus(
        _tensor([region for i, region in enumerate(regions) if i % every != every // 2]),
        _tensor([region for i, region in enumerate(regions) if i % every == every // 2]),
        files,
    )


def _read(path: Path, limit: int, source: Path) -> _Bytes | None:
    """The content of a regular file; None if it cannot be read. Raises DataError above `limit` bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size <= limit:
            return np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except OSError:
        return None
    raise DataError(
        f"{str(source)!r} holds more than {CORPUS_BYTES_MAX >> 30} GiB, but the built-in training keeps "
        "its data in memory: give a part of it, or write your own loop around diloco_worker.join"
    )


def _tensor(parts: list[_Bytes]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
