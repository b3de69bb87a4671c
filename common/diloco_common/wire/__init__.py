"""The messages between learners and shards: values, their limits, and the conversion to protobuf."""
