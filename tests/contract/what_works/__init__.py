"""The lines of docs/what-works.md, each as a script that joins real shards."""
