"""The messages between both sides: values, their limits, and the conversion to protobuf."""
