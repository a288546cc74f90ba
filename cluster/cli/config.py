"""`apar config`: checks, shows and describes configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from apar_core.errors import CheckpointError
from cluster.cli.terminal import clear_errors
from deployments.config import ClusterConfig, ConfigError, load_config
from deployments.config.model import ModelConfig

app = typer.Typer(no_args_is_help=True, help="Check, show and describe configuration files.")
console = Console()

ConfigFile = Annotated[Path, typer.Argument(help="YAML file for `apar serve --config`.")]


@app.command()
def check(file: ConfigFile) -> None:
    """Check a file as `apar serve` would; exits with 1 and names the field if it is invalid.

    With [i]engine[/i] arguments this takes seconds, because vLLM checks their names. Example:
    [bold]apar config check serve.yaml[/bold]
    """
    config = _load(file, check_engine_arguments=True)
    names = ", ".join(model.public_name for model in config.models)
    text = f"{file}: valid. Models: {names}."
    console.print(text, soft_wrap=True, highlight=False, markup=False)


@app.command()
def show(file: ConfigFile) -> None:
    """Print the file with all defaults filled in, and each model's limits as comments."""
    config = _load(file)
    values = config.model_dump(mode="json")
    for shown, model in zip(values["models"], config.models, strict=True):
        shown["name"] = model.public_name
        shown["max_concurrency"] = model.requests_per_replica
        shown["engine"] = model.preset.engine | model.engine
    typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)
    for model in config.models:
        least = model.replicas if model.autoscaling is None else model.autoscaling.min_replicas
        most = model.max_replicas
        replicas = str(most) if least == most else f"{least} to {most}"
        limits = f"{model.requests_per_replica} requests, {model.threads_per_replica} threads"
        typer.echo(f"# {model.public_name}: {model.preset.path}; {replicas} x {limits} per replica")


@app.command()
def schema() -> None:
    """Print the JSON schema of configuration files, with a description of every field."""
    typer.echo(json.dumps(config_schema(), indent=2))


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file; editors check YAML against it."""
    return ClusterConfig.model_json_schema()


def _load(file: Path, *, check_engine_arguments: bool = False) -> ClusterConfig:
    with clear_errors():
        config = load_config(file, {}, {})
        if check_engine_arguments:
            config.check_keys_file()
            if config.ray_address is None:
                config.check_secrets()
        for model in config.models:
            model.check_checkpoint()
            if check_engine_arguments and model.engine:
                _check_engine_arguments(model)
    return config


def _check_engine_arguments(model: ModelConfig) -> None:
    # Importing vLLM takes seconds.
    from deployments.replica.engine_factory import server_arguments

    try:
        server_arguments(model.preset.path, model.public_name, model.engine)
    except CheckpointError as error:
        raise ConfigError(f"{model.public_name}: {error}") from error
