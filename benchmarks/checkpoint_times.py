"""How long checkpoints take: 100 M parameters in 24 fragments on two shards, without training, on a given disk.

python benchmarks/checkpoint_times.py --folder /a/folder/on/the/disk
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from diloco_common.manifest import TensorSpec, cut
from diloco_deploy.cli import main as diloco
from diloco_server.core.arithmetic import Values
from diloco_server.core.record import Record
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.store import FileStore
from diloco_server.storage.version import Origin, StoredVersion

NUM_SHARDS = 2
MODEL = cut([TensorSpec(f"layer.{i:02}.weight", (2048, 2048)) for i in range(24)], 24, NUM_SHARDS)


def write_versions(folder: Path) -> None:
    """Write data folders with one version of every fragment, with Nesterov's momentum."""
    for index in range(NUM_SHARDS):
        origin = Origin("local", index, NUM_SHARDS, 24, "nesterov", "bfloat16")
        store = FileStore(Disk(folder / f"shard-{index}"), origin, first_epoch=1)
        store.recover()
        for fragment in MODEL.owned_by(index):
            n = fragment.num_elements
            record = Record(fragment.fragment_id, 1, 5, {}, {}, 10, (), 1.0)
            store.save(StoredVersion(record, Values(torch.randn(n), [torch.randn(n).bfloat16()]), None), MODEL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint-times"), help="made, and deleted")
    home = parser.parse_args().folder
    shutil.rmtree(home, ignore_errors=True)
    try:
        write_versions(home / "run")
        for name in ("first", "second", "third"):
            diloco(["checkpoint", str(home / "run"), "--name", name])
        checkpoint = str(home / "run" / "checkpoints" / "third")
        diloco(["checkpoint", "verify", checkpoint])
        diloco(["restore", checkpoint, "--shards", "3", "--folder", str(home / "restored")])
        diloco(["export", checkpoint, "--out", str(home / "model.safetensors")])
        diloco(["checkpoint", "copy", checkpoint, f"file://{(home / 'objects').resolve()}"])
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
