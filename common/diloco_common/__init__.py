"""Everything that servers and workers share: errors, settings, manifest, encodings, RPC conventions, histories."""

from diloco_common import forks as forks  # before anything that imports grpc
