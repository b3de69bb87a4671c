"""The cost of storing versions, and the time that a shard takes to recover.

Writes two versions of each fragment of a shard to a data folder, as the shard itself does: 100 M parameters in 24
fragments. Then starts `diloco-server` on the folder and waits until it serves.

    python benchmarks/recovery.py [--parameters 100_000_000] [--fragments 24] [--folder /a/disk] [--pull int8]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from diloco_common.codec import encode_payload
from diloco_common.codec.change import VALUES
from diloco_common.process import tune_allocator
from diloco_common.settings import Settings
from diloco_common.wire.addresses import read_address
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_server.core.arithmetic import Values
from diloco_server.core.record import Record
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.store import FileStore
from diloco_server.storage.version_file import Origin, StoredVersion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; default: the temporary folder")
    parser.add_argument("--pull", default="bfloat16", help="sync.pull; if it sends changes, anchors are stored, too")
    args = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="recovery-", dir=args.folder))
    try:
        settings = Settings.model_validate({"sync": {"fragments": args.fragments, "pull": args.pull}})
        figures = write(folder, settings, args.parameters) | recover(folder, settings)
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:32} {value:,.4g}")


def write(folder: Path, settings: Settings, parameters: int) -> dict[str, float]:
    """Write two versions of every fragment. Returns the cost of one version in bytes and seconds."""
    rows = 2400  # makes fragments of equal size
    manifest = cut([TensorSpec("w", (rows, parameters // rows))], settings.sync.fragments, 1)
    store = FileStore(Disk(folder), Origin.of(settings), first_epoch=1)
    store.recover()
    seconds, num_bytes = [], 0
    for version in (0, 1):
        for fragment in manifest.fragments:
            theta = torch.randn(fragment.num_elements)
            anchor = None if settings.sync.pull in VALUES else encode_payload(theta, "bfloat16")
            record = Record(fragment.fragment_id, 1, version, {"ann": version}, {"ann": "p"}, version)
            stored = StoredVersion(record, Values(theta, [(theta * 0.1).bfloat16()]), anchor)
            began = time.perf_counter()
            num_bytes += store.save(stored, manifest)
            seconds.append(time.perf_counter() - began)
    seconds.sort()
    return {
        "parameters": parameters,
        "bytes_per_parameter": num_bytes / 2 / parameters,
        "version_mb": num_bytes / len(seconds) / 1e6,
        "save_s_median": seconds[len(seconds) // 2],
        "write_mb_per_s": num_bytes / sum(seconds) / 1e6,
    }


def recover(folder: Path, settings: Settings) -> dict[str, float]:
    """Seconds from the start of the process until it serves. Files are in the page cache, as after SIGKILL."""
    address_file = folder / "address.json"
    flags = [f"--set=sync.fragments={settings.sync.fragments}", f"--set=sync.pull={settings.sync.pull}"]
    command = [sys.executable, "-m", "diloco_server", f"--set=shard.data_dir={folder}", *flags]
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, f"--address-file={address_file}"], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        while read_address(address_file) is None:
            if process.poll() is not None:
                raise SystemExit(f"the shard ended with {process.returncode}:\n{process.communicate()[1]}")
            time.sleep(0.01)
        served_s = time.perf_counter() - began
        process.terminate()
        said = process.communicate()[1]
    (recovered,) = [line for line in said.splitlines() if " recovered " in line and "took_s=" in line]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # there was one child, and it has ended
    return {
        "start_to_serving_s": served_s,
        "of_that_recovery_s": float(recovered.split("took_s=")[1].split()[0]),
        "cpu_s": used.ru_utime + used.ru_stime,
    }


if __name__ == "__main__":
    main()
