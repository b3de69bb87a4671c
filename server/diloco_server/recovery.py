"""What a shard does with what its store holds, before it serves anybody."""

from __future__ import annotations

from diloco_common.errors import DataError
from diloco_common.logs import Log
from diloco_common.manifest import Manifest
from diloco_common.settings import Settings
from diloco_server.core import arithmetic
from diloco_server.core.fragment import Restored
from diloco_server.core.outer import OuterOptimizer
from diloco_server.storage.store import Found, Store, WrongFolder


def recover(
    store: Store, settings: Settings, optimizer: OuterOptimizer, log: Log
) -> tuple[Manifest, list[Restored]] | None:
    """The model and its versions as a shard goes on from them; None where there are none. May take seconds.

    Raises DataError where nothing can be used, or not be read now.
    """
    try:
        recovered = store.recover()
    except OSError as error:
        raise DataError(
            f"a version in shard.data_dir cannot be read now ({error.filename}: {error.strerror}). It may be intact, "
            "so it is not passed over: see to that, and start the shard again"
        ) from None
    for words in recovered.damage:
        log.error("version damaged or missing, the one before is used", code="VERSION_DAMAGED", why=words)
    if recovered.manifest is None:
        return None
    restored = [_restored(found, settings, optimizer) for found in recovered.versions]
    for r in restored:
        log.event(
            "fragment recovered", fragment=r.record.fragment_id, epoch=r.record.epoch, version=r.record.version,
            new_line=r.is_new_line,
        )  # fmt: skip
    _name_missing(recovered.manifest, restored, settings, log)
    return recovered.manifest, restored


def _name_missing(manifest: Manifest, restored: list[Restored], settings: Settings, log: Log) -> None:
    """Fragments without any file: nobody had seeded them yet, or their files were taken away."""
    there = {r.record.fragment_id for r in restored}
    missing = [f.fragment_id for f in manifest.owned_by(settings.shard.index) if f.fragment_id not in there]
    if missing and any(r.record.version > 0 for r in restored):
        log.error(
            "fragments have no file, though others have versions: learners that hold them bring them again, from "
            "version 0; if they had versions, end this shard and restore a checkpoint",
            code="VERSION_DAMAGED", fragments=missing,
        )  # fmt: skip


def _restored(found: Found, settings: Settings, optimizer: OuterOptimizer) -> Restored:
    stored, pull = found.stored, settings.sync.pull
    if len(stored.values.buffers) != optimizer.num_buffers:
        raise WrongFolder(
            f"the data folder holds {len(stored.values.buffers)} buffers of the outer optimizer per fragment, "
            f"outer.optimizer {settings.outer.optimizer} with momentum {settings.outer.momentum:g} has "
            f"{optimizer.num_buffers}: give the settings it was made with, or another folder (shard.data_dir)"
        )
    is_same_encoding = found.pull == pull
    if stored.anchor is not None and is_same_encoding:
        published = arithmetic.Published(stored.anchor)
    else:
        published = arithmetic.publish(stored.values, pull)
    return Restored(stored.record, stored.values, published, found.is_behind or not is_same_encoding)
