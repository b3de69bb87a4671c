"""Checkpoints in an object store, through `obstore`, an extra that is loaded only when needed.

Credentials, region and endpoint come from the usual environment variables (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
The manifest is written last, and never over another one. So a checkpoint with a manifest is complete, and no checkpoint
ever changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import timedelta
from typing import Any

from diloco_common.errors import BadCheckpoint, CannotConnect, ConfigError
from diloco_server.storage.checkpoint import MANIFEST, CheckpointFile, Contents, check_listed, encode_manifest
from diloco_server.storage.filesystem import Files, OldFile
from diloco_server.storage.version_file import check_version

BLOCK_BYTES = 8 * 2**20
TRIED_AGAIN = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}


class ObjectFolder:
    """The objects under a URL, as `Files` of `storage.filesystem`."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a wrong URL, or if the extra is missing."""
        try:
            import obstore
        except ModuleNotFoundError:
            raise ConfigError(
                "URLs of checkpoints need obstore, which is not installed: "
                "pip install 'decoupled-diloco-ops[object-store]'"
            ) from None
        self.url, self._obstore = url.rstrip("/"), obstore
        remote = {"client_options": {"allow_http": True}, "retry_config": TRIED_AGAIN}
        more: Any = {"mkdir": True} if url.startswith("file://") else remote
        try:
            self.store: Any = obstore.store.from_url(self.url, **more)
        except (ValueError, OSError, obstore.exceptions.BaseError) as error:
            raise ConfigError(f"{url}: {str(error).splitlines()[0]}") from None

    def names(self) -> Sequence[str]:
        """Raises CannotConnect."""
        with self._told():
            found = [meta["path"] for chunk in self._obstore.list(self.store) for meta in chunk]
        return sorted(path for path in found if "/" not in path)

    def open(self, name: str) -> OldFile:
        """Raises FileNotFoundError and CannotConnect."""
        with self._told():
            try:
                return _OldObject(self._obstore.open_reader(self.store, name, buffer_size=BLOCK_BYTES), self._told)
            except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
                raise FileNotFoundError(2, "No such object", name) from None

    def put(self, name: str, blocks: Iterator[bytes]) -> None:
        """Write an object, whole or not at all. Replaces any object of that name. Raises CannotConnect."""
        with self._told():
            self._obstore.put(self.store, name, blocks, max_concurrency=4)

    def put_new(self, name: str, content: bytes) -> None:
        """Write a new object. Raises BadCheckpoint if it exists already, and CannotConnect."""
        with self._told():
            self._obstore.put(self.store, name, content, mode="create", use_multipart=False)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._obstore.exceptions.AlreadyExistsError:
            raise BadCheckpoint(f"{self.url} is a checkpoint already, and none is ever changed") from None
        except self._obstore.exceptions.BaseError as error:
            raise CannotConnect(
                f"{self.url}: {str(error).splitlines()[0]}. Check the URL, the credentials and the endpoint in the "
                "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL)"
            ) from None


class _OldObject:
    """Reads a version from start to end in small slices; obstore reads blocks, and keeps the last one."""

    def __init__(self, reader: Any, told: Callable[[], AbstractContextManager[None]]) -> None:
        self.size: int = reader.size
        self._reader, self._told = reader, told

    def read_into(self, out: memoryview, offset: int) -> int:
        with self._told():
            if self._reader.tell() != offset:  # seeking throws the block away
                self._reader.seek(offset)
            found = bytes(self._reader.read(min(len(out), max(0, self.size - offset))))
        out[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._reader.close()


def copy_checkpoint(source: Files, contents: Contents, url: str) -> None:
    """Copy a checkpoint with intact files. Safe to call again after an interruption.

    Raises VersionDamaged, BadCheckpoint if there is something else at `url`, CannotConnect, and ConfigError.
    """
    target = ObjectFolder(url)
    if strangers := set(target.names()) - {file.name for file in contents.files}:
        raise BadCheckpoint(f"{url} is not empty ({min(strangers)} is there): give another URL")
    for file in contents.files:
        check_version(source, file.name)
        check_listed(source, file, contents)
        target.put(file.name, _blocks(source, file))
    target.put_new(MANIFEST, encode_manifest(contents))


def _blocks(source: Files, file: CheckpointFile) -> Iterator[bytes]:
    with closing(source.open(file.name)) as opened:
        for start in range(0, file.num_bytes, BLOCK_BYTES):
            block = bytearray(min(BLOCK_BYTES, file.num_bytes - start))
            opened.read_into(memoryview(block), start)
            yield bytes(block)
