"""Configuration of a cluster: one module for each section of the YAML file."""

from cluster.config.cluster import (
    ClusterConfig,
    ConfigError,
    StartError,
    load_config,
    problems_of,
    read_yaml,
)

__all__ = [
    "ClusterConfig",
    "ConfigError",
    "StartError",
    "load_config",
    "problems_of",
    "read_yaml",
]
