"""Where a shard is: an address, or `@FILE`, the address file of a shard that may come back on another machine.

A shard writes the file when it has bound its ports (`--address-file`), whole or not at all. Before each call it is
read again if it has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diloco_common.errors import ConfigError, WrongCall, shown
from diloco_common.ports import Unavailable
from diloco_common.trust.tls import Stamp, stamp_of
from diloco_common.wire.addresses import parse_address, read_address

FILE_MARK = "@"
MISSING: Stamp = (None,)


def addresses_of(shards: str | Sequence[str]) -> list[str]:
    """The addresses of all shards of a run, or the files that name them, each once. Raises ConfigError."""
    if not isinstance(shards, list | tuple | set | frozenset | str) or not all(isinstance(a, str) for a in shards):
        raise WrongCall(f"shards is {shown(shards)}: give addresses, such as ps-0:50051,ps-1:50051, or a list of them")
    named = shards.split(",") if isinstance(shards, str) else list(shards)
    stripped = [a.strip() for a in named if a.strip()]
    addresses = [a if a.startswith(FILE_MARK) else str(parse_address(a)) for a in stripped]
    if not addresses:
        raise ConfigError("no shard addresses given; name all shards, such as ps-0:50051,ps-1:50051")
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        raise ConfigError(f"shard {twice[0]} is named twice; name every shard once")
    return addresses


class Whereabouts:
    """Of one shard."""

    def __init__(self, given: str) -> None:
        """`given`: host:port or `@FILE`."""
        self._file = Path(given[len(FILE_MARK) :]) if given.startswith(FILE_MARK) else None
        self._address = "" if self._file is not None else given
        self._stamp: Stamp = ()

    def now(self) -> str:
        """host:port; what was read last while the file is gone: the shard may be where it was.

        Raises Unavailable: the shard has not been anywhere yet.
        """
        if self._file is not None and (stamp := stamp_of([self._file])) != self._stamp:
            found = read_address(self._file)
            if found is not None and found.role == "shard" and found.grpc:
                self._address = found.grpc
                self._stamp = stamp  # a read that failed is done again, although the file may stay as it is
            elif stamp == MISSING:
                self._stamp = stamp
        if not self._address:
            raise Unavailable(f"{self._file} names no address: the shard that writes it has not started yet")
        return self._address
