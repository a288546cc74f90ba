"""`apar keys`: creates API keys and their hashes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError

from cluster.config import problems_of
from cluster.config.keys import KeyConfig, hash_of, new_token

app = typer.Typer(no_args_is_help=True, help="Create API keys and their hashes.")

KeyName = Annotated[str, typer.Argument(help="Owner of the key, as shown in logs and metrics.")]


@app.command()
def new(name: KeyName) -> None:
    """Create an API key; print it and its record for the configuration.

    The record has only the key's hash, so the key cannot be read from the configuration. Example:
    [bold]apar keys new alice[/bold]
    """
    token = new_token()
    record = _record(name, token)
    typer.echo(f"Key, shown only once: {token}\n")
    typer.echo("Record for `keys` in the configuration or for the `keys_file`:")
    typer.echo(record, nl=False)


@app.command("hash")
def hash_key(name: KeyName) -> None:
    """Print the record of an existing key, read from standard input.

    The hash is a fast one, so the key must be long and random, as [bold]apar keys new[/bold] makes
    them. Example: [bold]apar keys hash alice < key.txt[/bold]
    """
    typed = sys.stdin.isatty()
    token = typer.prompt("Key", hide_input=True) if typed else sys.stdin.readline().strip()
    if not token:
        typer.echo("Error: no key on standard input", err=True)
        raise typer.Exit(1)
    typer.echo(_record(name, token), nl=False)


def _record(name: str, token: str) -> str:
    try:
        key = KeyConfig(name=name, hash=hash_of(token))
    except ValidationError as error:
        typer.echo(f"Error: {problems_of(error)}", err=True)
        raise typer.Exit(1) from error
    return yaml.safe_dump([key.model_dump(exclude_unset=True)], sort_keys=False)
