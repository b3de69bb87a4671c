"""Everything that servers and workers share: errors, settings, manifest, encodings, RPC conventions, histories."""
