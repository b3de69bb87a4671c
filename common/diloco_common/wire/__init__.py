"""What both sides say to each other: values, their limits, and how both become messages."""
