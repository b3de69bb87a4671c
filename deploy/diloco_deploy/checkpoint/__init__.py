"""The commands for checkpoints: take, list, verify, copy, restore, export."""
