"""Where versions are kept: what a file looks like, in which order it is written, and who may write."""
