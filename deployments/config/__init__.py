"""Configuration of a cluster: one module per section of the YAML file."""

from deployments.config.cluster import ClusterConfig, load_config
from deployments.config.files import ConfigError, SecretError, StartError, problems_of

__all__ = [
    "ClusterConfig",
    "ConfigError",
    "SecretError",
    "StartError",
    "load_config",
    "problems_of",
]
