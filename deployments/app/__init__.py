"""The Ray Serve application: composition, start, rollout, autoscaling and shutdown."""
