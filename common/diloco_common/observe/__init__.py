"""A process's reports about itself: logs, HTTP, metrics, histories."""
