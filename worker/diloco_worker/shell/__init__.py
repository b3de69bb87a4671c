"""What carries out the decisions of the core: threads, the event loop, gRPC, and the user's model and optimizers."""
