"""Sources of harm: faults and hostile learners."""
