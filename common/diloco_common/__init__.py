"""Shared by servers and workers: errors, settings, manifest, encodings, RPC conventions, histories."""

import sys

if sys.platform == "win32":
    raise ImportError("decoupled-diloco needs Linux; on Windows, install it in WSL 2 (docs/home.md)")

from diloco_common import forks as forks  # before anything that imports grpc
