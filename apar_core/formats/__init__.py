"""How model families mark forks in their tokens."""
