"""What servers and workers share: errors, settings, the manifest, encodings, and the RPC conventions."""
