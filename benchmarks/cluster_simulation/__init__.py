"""The router's and the fork policy's own code, driven by simulated replicas and recorded load."""
