"""Recovery: a shard loads the versions in its store before it serves its first call."""

from __future__ import annotations

from collections.abc import Callable

from diloco_common.errors import DataError, WrongFolder
from diloco_common.logs import Log
from diloco_common.manifest import Fragment, Manifest, model_digest
from diloco_common.settings import Settings
from diloco_server.core import arithmetic
from diloco_server.core.arithmetic import Making, Values
from diloco_server.core.fragment import Restored
from diloco_server.core.outer import OuterOptimizer
from diloco_server.storage.store import Found, Store


def recover(
    store: Store, settings: Settings, making: Callable[[Fragment], Making], log: Log
) -> tuple[Manifest, list[Restored]] | None:
    """The model, and the versions to go on from; None if there are none. May take seconds. `making`: how versions of a
    fragment are made.

    Raises DataError if no version can be used, or if one cannot be read now.
    """
    try:
        recovered = store.recover()
    except OSError as error:
        raise DataError(
            f"a version in shard.data_dir cannot be read or put aside now ({error.filename}: {error.strerror}). It may "
            "be intact, so the shard does not pass over it: fix the cause, and start the shard again"
        ) from None
    for words in recovered.damage:
        log.error("version damaged or missing; using the one before", code="VERSION_DAMAGED", why=words)
    if recovered.manifest is None:
        return None
    if settings.run.model not in ("", found := model_digest(recovered.manifest.tensors)):
        raise WrongFolder(
            f"the data folder holds versions of the model {found}, but run.model is {settings.run.model}: give the "
            "settings that made the folder, or another folder (shard.data_dir)"
        )
    fragments = {f.fragment_id: f for f in recovered.manifest.fragments}
    restored = [
        _restored(found, settings, fragment, making(fragment).optimizer)
        for found in recovered.versions
        for fragment in [fragments[found.stored.record.fragment_id]]
    ]
    for r in restored:
        log.event(
            "fragment recovered", fragment=r.record.fragment_id, epoch=r.record.epoch, version=r.record.version,
            new_line=r.is_new_line,
        )  # fmt: skip
    _name_missing(recovered.manifest, restored, settings, log)
    return recovered.manifest, restored


def _name_missing(manifest: Manifest, restored: list[Restored], settings: Settings, log: Log) -> None:
    """Log the fragments without any file: they were never seeded, or their files were removed."""
    there = {r.record.fragment_id for r in restored}
    missing = [f.fragment_id for f in manifest.owned_by(settings.shard.index) if f.fragment_id not in there]
    if missing and any(r.record.version > 0 for r in restored):
        log.error(
            "fragments have no file, though others have versions: learners that hold them will seed them again, as "
            "version 0. If they had versions, stop this shard and restore a checkpoint",
            code="VERSION_DAMAGED", fragments=missing,
        )  # fmt: skip


def _restored(found: Found, settings: Settings, fragment: Fragment, optimizer: OuterOptimizer) -> Restored:
    stored, pull = found.stored, settings.sync.pull
    if len(stored.values.buffers) != optimizer.num_buffers:
        raise WrongFolder(
            f"the data folder holds {len(stored.values.buffers)} buffers of the outer optimizer per fragment, but "
            f"outer.optimizer {settings.outer.optimizer} with momentum {settings.outer.momentum:g} has "
            f"{optimizer.num_buffers}: give the settings that made the folder, or another folder (shard.data_dir)"
        )
    values = Values(stored.values.theta, [b.to(optimizer.buffer_dtype) for b in stored.values.buffers])
    is_same_encoding = found.pull == pull
    if stored.anchor is not None and is_same_encoding:
        published = arithmetic.Published(stored.anchor)
    else:
        published = arithmetic.publish(values, fragment.encoding(pull))
    return Restored(stored.record, values, published, found.is_behind or not is_same_encoding)
