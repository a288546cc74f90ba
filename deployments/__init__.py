"""The processes that a request passes: gateway and replica on Ray Serve."""
