"""`apar keys`: API keys and their hashes; keys and usage of a running server."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer
import yaml
from pydantic import ValidationError

from cluster.durations import parse_duration
from deployments.config import problems_of
from deployments.config.keys import MAX_PRIORITY, KeyConfig, hash_of, new_token

app = typer.Typer(no_args_is_help=True, help="API keys, and what they use.")

ADMIN_KEY_ENV = "APAR_ADMIN_KEY"
_TIMEOUT_S = 30.0
_COUNTERS = (
    "requests", "errors", "refused", "prompt_tokens", "generated_tokens", "threads", "forks",
)  # fmt: skip
Url = Annotated[str, typer.Option(help="Address of the server.")]
AdminKeyEnv = Annotated[str, typer.Option(help="Environment variable with an admin's API key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_URL = "http://127.0.0.1:8000"

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


@app.command()
def create(
    name: KeyName,
    url: Url = _URL,
    admin_key_env: AdminKeyEnv = ADMIN_KEY_ENV,
    models: Annotated[
        str | None, typer.Option(help="Names of the models that the key may use, with commas.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Make it an admin's key.")] = False,
    expires_in: Annotated[
        str | None, typer.Option(help="Time until the key stops working, such as 12h or 30d.")
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(help="Priority class; lower first.", min=-MAX_PRIORITY, max=MAX_PRIORITY),
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Weight in fair queueing.")] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Limit on requests per minute.", min=1)
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Limit on tokens per minute.", min=1)
    ] = None,
    requests_per_day: Annotated[
        int | None, typer.Option(help="Budget of requests per day.", min=1)
    ] = None,
    requests_per_month: Annotated[
        int | None, typer.Option(help="Budget of requests per month.", min=1)
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(help="Budget of tokens per day.", min=1)
    ] = None,
    tokens_per_month: Annotated[
        int | None, typer.Option(help="Budget of tokens per month.", min=1)
    ] = None,
    max_threads: Annotated[
        int | None, typer.Option(help="Limit on running threads.", min=1)
    ] = None,
) -> None:
    """Create a key on a running server; print it, once.

    Only its hash is sent. Example: [bold]apar keys create alice --tokens-per-day 100000[/bold]
    """
    token = new_token()
    fields: dict[str, Any] = {"name": name, "hash": hash_of(token)}
    if models is not None:
        fields["models"] = [model.strip() for model in models.split(",")]
    if admin:
        fields["admin"] = True
    if expires_in is not None:
        fields["expires_at"] = (datetime.now(UTC) + _lifetime(expires_in)).isoformat()
    limits = {
        "priority": priority,
        "weight": weight,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "requests_per_day": requests_per_day,
        "requests_per_month": requests_per_month,
        "tokens_per_day": tokens_per_day,
        "tokens_per_month": tokens_per_month,
        "max_threads": max_threads,
    }
    fields |= {field: value for field, value in limits.items() if value is not None}
    created = _ask("POST", url, "/admin/keys", admin_key_env, json=fields)
    typer.echo(f"Key, shown only once: {token}")
    typer.echo(f"Name {created['name']}, id {created['id']}.")


@app.command("list")
def list_keys(
    url: Url = _URL, admin_key_env: AdminKeyEnv = ADMIN_KEY_ENV, as_json: AsJson = False
) -> None:
    """List the keys of a running server, without their hashes.

    Example: [bold]apar keys list --url http://127.0.0.1:8000[/bold]
    """
    keys = _ask("GET", url, "/admin/keys", admin_key_env)["data"]
    if as_json:
        typer.echo(json.dumps(keys, indent=2))
        return
    facts = ("name", "id", "source", "created_at", "expires_at")
    rows = []
    for key in keys:
        rest = {field: value for field, value in key.items() if field not in (*facts, "created_by")}
        limits = ", ".join(f"{field} {_plain(value)}" for field, value in rest.items())
        rows.append([*(_short(key.get(fact)) for fact in facts), limits])
    _print_table([*facts, "limits"], rows)


@app.command()
def revoke(
    name: KeyName,
    url: Url = _URL,
    admin_key_env: AdminKeyEnv = ADMIN_KEY_ENV,
    key_id: Annotated[
        str | None, typer.Option("--id", help="Only the key with this id; by default all.")
    ] = None,
) -> None:
    """Revoke the keys of a name on a running server, or one of them.

    Every gateway refuses them within two seconds. Requests that run already go on. Keys of the
    configuration are removed there. Example: [bold]apar keys revoke alice[/bold]
    """
    parameters = {} if key_id is None else {"id": key_id}
    path = f"/admin/keys/{quote(name, safe='')}"
    answer = _ask("DELETE", url, path, admin_key_env, params=parameters)
    for key in answer["revoked"]:
        typer.echo(f"Revoked {key['name']}, id {key['id']}.")


@app.command()
def usage(
    url: Url = _URL,
    admin_key_env: AdminKeyEnv = ADMIN_KEY_ENV,
    first: Annotated[
        str | None, typer.Option("--from", help="First day (UTC), such as 2026-11-01.")
    ] = None,
    last: Annotated[str | None, typer.Option("--to", help="Last day; by default today.")] = None,
    key: Annotated[str | None, typer.Option(help="Name of a key; by default all.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of a model; by default all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report what the keys of a running server have used, by day, key and model.

    By default, of the last 30 days. Example: [bold]apar keys usage --from 2026-11-01[/bold]
    """
    given = {"from": _day(first, "--from"), "to": _day(last, "--to"), "key": key, "model": model}
    parameters = {name: value for name, value in given.items() if value is not None}
    report = _ask("GET", url, "/admin/usage", admin_key_env, params=parameters)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    rows = [
        [str(row[name]) for name in ("day", "key", "model", *_COUNTERS)] for row in report["data"]
    ]
    sums = [str(sum(row[name] for row in report["data"])) for name in _COUNTERS]
    _print_table(["day", "key", "model", *_COUNTERS], [*rows, ["total", "", "", *sums]], numbers=3)


def _ask(method: str, url: str, path: str, admin_key_env: str, **fields: Any) -> Any:
    """Send a request with the admin's key; exits with the server's reason if it is refused."""
    import httpx

    token = os.environ.get(admin_key_env, "")
    if not token:
        _fail(f"set the environment variable {admin_key_env} to an admin's API key")
    try:
        answer = httpx.request(
            method,
            url.rstrip("/").removesuffix("/v1") + path,
            headers={"authorization": f"Bearer {token}"},
            timeout=_TIMEOUT_S,
            **fields,
        )
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        _fail(f"no answer from {url}: {error}")
    if answer.is_error:
        _fail(body.get("error", {}).get("message", f"HTTP {answer.status_code}"))
    return body


def _fail(message: str) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1)


def _lifetime(text: str) -> timedelta:
    days = text.removesuffix("d")
    if days != text and days.isdigit():
        return timedelta(days=int(days))
    try:
        return timedelta(seconds=parse_duration(text))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--expires-in'") from error


def _day(text: str | None, option: str) -> str | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a day such as 2026-11-23", param_hint=f"'{option}'"
        ) from error


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _short(value: Any) -> str:
    # A time without its fractions of seconds.
    return "" if value is None else str(value).partition(".")[0]


def _print_table(head: list[str], rows: list[list[str]], *, numbers: int | None = None) -> None:
    """Print columns; those from `numbers` on are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if numbers is not None and index >= numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())


def _record(name: str, token: str) -> str:
    try:
        key = KeyConfig(name=name, hash=hash_of(token))
    except ValidationError as error:
        typer.echo(f"Error: {problems_of(error)}", err=True)
        raise typer.Exit(1) from error
    return yaml.safe_dump([key.model_dump(exclude_unset=True)], sort_keys=False)
