"""Reads the file of API keys that a secret is mounted as."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cluster.config import ClusterConfig, ConfigError, problems_of, read_yaml
from cluster.config.keys import KeyConfig, check_keys

_KEYS = TypeAdapter(tuple[KeyConfig, ...])


def check_keys_file(config: ClusterConfig) -> None:
    """Raise ConfigError where the `keys_file` cannot be read, or contradicts the `keys`."""
    if config.keys_file is None:
        return
    loaded = load_keys(config.keys_file.expanduser())
    try:
        check_keys([*config.keys, *loaded])
    except ValueError as error:
        raise ConfigError(f"keys_file: {config.keys_file}: {error}") from error


def load_keys(path: Path) -> tuple[KeyConfig, ...]:
    """The keys of a YAML or JSON file that holds a list of records.

    Raises ConfigError for a file that cannot be read or holds anything else. An empty list is in
    order: then nobody may call.
    """
    loaded = read_yaml(path)
    try:
        keys = _KEYS.validate_python(loaded)
        check_keys(keys)
    except ValidationError as error:
        raise ConfigError(f"{path}: {problems_of(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return keys
