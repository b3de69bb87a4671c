"""The commands around checkpoints: take, list, verify, copy, restore, export."""
