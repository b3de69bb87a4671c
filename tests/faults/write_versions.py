"""A process that keeps three versions in `data` of the folder that it is given, and says each once it is durable.

It says "ready" and waits for a file `go` first, so that somebody can begin to trace it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from diloco_server.storage.filesystem import Disk
from stores import MANIFEST, make_version, open_store
from waiting import until

folder = Path(sys.argv[1])
print("ready", flush=True)
until((folder / "go").exists, "the word to begin")
store = open_store(Disk(folder / "data"))
store.recover()
for version in range(3):
    store.save(make_version(version), MANIFEST)
    print(version, flush=True)
