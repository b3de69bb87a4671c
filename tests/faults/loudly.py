"""Tests that need root, a tool or a kernel feature are skipped where there is none, and say so loudly."""

from __future__ import annotations

import shutil
import warnings
from typing import NoReturn

import pytest


def skip(what: str, why: str) -> NoReturn:
    """`what` is NOT shown on this machine."""
    warnings.warn(f"{what} was NOT tried: {why}", stacklevel=2)
    pytest.skip(why)


def need(what: str, **tools: str) -> None:
    """Skip where a tool is missing: need("a full disk", mount="util-linux") names tools and their Debian packages."""
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            skip(what, f"{tool} is not installed (Debian package: {package})")
