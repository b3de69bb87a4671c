"""The commands of `diloco`, one file each: their options, and which function does the work."""
