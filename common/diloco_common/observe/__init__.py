"""What a process says of itself: logs, HTTP, metrics, histories."""
