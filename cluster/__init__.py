"""Configuration, autoscaling, load tests, experiments, sizing and the `apar` command."""
