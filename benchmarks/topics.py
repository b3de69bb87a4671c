"""English prose that comes with Python (`pydoc_data.topics`): the text of benchmarks that need no better one."""

from __future__ import annotations

import pydoc_data.topics

import numpy as np
from numpy.typing import NDArray


def topics() -> list[str]:
    return [words for _, words in sorted(pydoc_data.topics.topics.items())]


def characters() -> NDArray[np.int64]:
    """All of it, its different characters as numbers from 0."""
    words = "\n".join(topics())
    code = {c: i for i, c in enumerate(sorted(set(words)))}
    return np.array([code[c] for c in words])
