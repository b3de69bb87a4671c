"""The `diloco` command: brings up a cluster on this machine, supervises it, and shows its state."""
