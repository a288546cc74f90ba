"""Size of the cluster that a load needs: memory, step times, queueing."""
