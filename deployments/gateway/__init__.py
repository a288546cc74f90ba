"""The HTTP entry point: authentication, limits, fair queueing and request logs."""
