"""A process that keeps three versions in the folder that it is given, and says each once it is durable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from diloco_server.storage.filesystem import Disk
from stores import MANIFEST, make_version, open_store

store = open_store(Disk(Path(sys.argv[1])))
store.recover()
for version in range(3):
    store.save(make_version(version), MANIFEST)
    print(version, flush=True)
