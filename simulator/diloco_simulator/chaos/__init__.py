"""What does harm: faults, and hostile learners."""
