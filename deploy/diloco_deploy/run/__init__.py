"""Runs a cluster: `diloco up` on this machine or on Ray, its child processes, its folder, and how to resume it."""
