"""What is decided across replicas, and the `apar` command."""
