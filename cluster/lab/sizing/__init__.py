"""How large a cluster has to be for a load: memory, step times, queueing."""
