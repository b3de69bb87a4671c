"""The surroundings of simulated processes: time, threads, network, disks, and the model that they train."""
