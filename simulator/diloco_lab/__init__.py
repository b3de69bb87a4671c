"""`diloco lab`: whole runs in one process, on a virtual clock, to compare rules and settings by what they learn.

The production cores of shards and learners decide and calculate. There are no processes, threads or network. Instead,
a run has conditions that imitate their effects: speeds, delays, drops.
"""
