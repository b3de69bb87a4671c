"""`diloco lab`: whole runs in one process, on a virtual clock, to compare rules and settings by what they learn.

The production cores of shards and learners decide and calculate. Leaves out processes, threads and the network; what
those do to a run is put in as conditions: speeds, delays, drops.
"""
