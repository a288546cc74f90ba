"""The values that travel between gateway and replica."""
