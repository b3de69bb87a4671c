"""Whether a run has kept its promises."""
