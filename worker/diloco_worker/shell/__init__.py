"""Carries out the core's decisions: threads, the event loop, gRPC, and the user's model and optimizers."""
