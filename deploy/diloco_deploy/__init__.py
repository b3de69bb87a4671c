"""The `diloco` command: brings a cluster up on this machine, looks after it, and shows how it is doing."""
