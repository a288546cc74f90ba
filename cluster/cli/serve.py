"""`apar serve`: the application on a private Ray cluster, until it is told to stop."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console
from rich.markup import escape

from apar_core.errors import AparError
from cluster.cli.serve_signals import ServeSignals, StopSignal
from cluster.config import ClusterConfig, ConfigError, StartError, load_config
from cluster.config.keys_file import check_keys_file
from cluster.config.model import DEFAULT_MODEL, PRESETS, ModelConfig
from cluster.local_ray import NAMESPACE, local_ray, reap_orphans
from cluster.logs import shown_logs
from cluster.metrics.targets import (
    check_targets_file,
    discovery_url,
    node_targets,
    write_targets,
)
from cluster.server_state import RolloutOutcome, ServerState, state_path, write_state

READY_S = 60.0
REAP_PERIOD_S = 5.0
POLL_S = 0.2
console = Console()

Load = Callable[[], ClusterConfig]

ModelName = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(PRESETS)}, a checkpoint folder or a hub name. "
        f"Default: {DEFAULT_MODEL}, which is part of this package."
    ),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(help="Requests that one replica runs at once; more wait. Default: preset."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(help="Running Ray cluster to use (`auto` finds it). Default: a private one."),
]
AllowAnonymous = Annotated[
    bool,
    typer.Option(
        "--allow-anonymous",
        help="Let everyone who reaches the address call without an API key. Without keys in the "
        "file, an address that others reach needs it.",
    ),
]


def serve(
    model: ModelName = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. Default: 8000.")] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on. Default: 127.0.0.1; 0.0.0.0 for everyone."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Engines behind the address. Default: 1.")
    ] = None,
    max_concurrency: MaxConcurrency = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with these and further settings.")
    ] = None,
    ray_address: RayAddress = None,
    allow_anonymous: AllowAnonymous = False,
) -> None:
    """Serve one model, or those of a file, with an OpenAI-compatible HTTP API.

    Starts a private Ray cluster, a gateway and the models' replicas; prints the address when
    they are ready. Ctrl-C stops everything that was started. [bold]apar config schema[/bold]
    describes the file.
    """
    overrides = {
        "port": port,
        "host": host,
        "ray_address": ray_address,
        "allow_anonymous": allow_anonymous or None,
    }
    model_overrides = {
        "checkpoint": model,
        "replicas": replicas,
        "max_concurrency": max_concurrency,
    }

    def load() -> ClusterConfig:
        settings = load_config(config, overrides, model_overrides)
        for served in settings.models:
            check_checkpoint(served)
        check_keys_file(settings)
        if settings.ray_address is None:
            # A private cluster's processes share this one's environment and files.
            settings.check_secrets()
        return settings

    try:
        settings = load()
        _check_surroundings(settings)
        signals = ServeSignals()
        run(settings, signals, lambda service: _watch(service, signals, load, config))
    except AparError as error:
        console.print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error


def check_checkpoint(model: ModelConfig) -> None:
    """Raise ConfigError if the checkpoint is given as a path and nothing lies there."""
    path = Path(model.checkpoint).expanduser()
    if model.checkpoint.startswith(("/", ".", "~")) and not path.is_dir():
        raise ConfigError(f"no such folder: {path}")


def _check_surroundings(settings: ClusterConfig) -> None:
    """Raise ConfigError if the address cannot be listened on, or a file not be written."""
    check_targets_file(settings.metrics.targets_file)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"
            ) from error


def run(settings: ClusterConfig, signals: ServeSignals, wait: Callable[[Any], None]) -> None:
    """Serve until `wait` returns or a signal arrives; stops all that it has started."""
    signals.install()
    try:
        with _cluster(settings), shown_logs(settings, sys.stderr):
            signals.install()
            # Imports Ray Serve, which takes seconds.
            from deployments.app.service import running_service

            console.print(f"Starting {_names(settings)} ...", markup=False)
            started = time.monotonic()
            with running_service(settings) as service:
                _wait_until_healthy(service.url)
                _print_ready(settings, service.url, time.monotonic() - started)
                signals.serves = True
                try:
                    wait(service)
                except BaseException:
                    if signals.stopping:
                        _drain(service)
                    raise
    except StopSignal:
        console.print("Stopped.")
    except Exception:
        # Raised amid Ray's C code, the signal's exception comes back as a SystemError.
        if not signals.stopping:
            raise
        console.print("Stopped.")


def _drain(service: Any) -> None:
    """Let the running requests end, in the time that they get for it."""
    seconds = service.config.drain_s
    console.print(
        f"Stopping: running requests get {seconds:.0f} s to end. Once more stops at once.",
        soft_wrap=True,
        highlight=False,
    )
    if cut := service.drain():
        console.print(f"{cut} requests had not ended; they got an error.", highlight=False)


def _watch(service: Any, signals: ServeSignals, load: Load, config: Path | None) -> None:
    """Serve for ever; roll out the file whenever a SIGHUP asks for it."""
    own = frozenset(child.pid for child in psutil.Process().children())
    path = state_path(service.config.port)
    state = ServerState.of_this_process(config)
    write_state(path, state)
    file = service.config.metrics.targets_file if service.config.metrics.enabled else None
    next_reap = time.monotonic()
    try:
        while True:
            time.sleep(POLL_S)
            if time.monotonic() >= next_reap:
                reap_orphans(own)
                if file is not None:
                    with suppress(OSError):  # It could be written when the server started.
                        write_targets(file, node_targets())
                next_reap = time.monotonic() + REAP_PERIOD_S
            if signals.take_rollout():
                number = 1 if state.outcome is None else state.outcome.number + 1
                succeeded, message = _roll_out(service, load, config)
                console.print(message, soft_wrap=True, markup=False, highlight=False)
                outcome = RolloutOutcome(number=number, succeeded=succeeded, message=message)
                state = state.model_copy(update={"outcome": outcome})
                write_state(path, state)
    finally:
        path.unlink(missing_ok=True)


def _roll_out(service: Any, load: Load, config: Path | None) -> tuple[bool, str]:
    """Whether the file's settings are served now, and what has become of them."""
    if config is None:
        return False, "No rollout: this server was started without --config."
    try:
        changed: list[str] = service.rollout(load())
    except AparError as error:
        return False, f"No rollout: {error}"
    return True, f"Rolled out {config}: {'; '.join(changed) or 'nothing has changed'}."


@contextmanager
def _cluster(settings: ClusterConfig) -> Iterator[None]:
    if settings.ray_address is None:
        num_cpus = max(os.cpu_count() or 1, settings.num_replicas)
        with local_ray(num_cpus=num_cpus, metrics=settings.metrics):
            yield
        return
    import ray

    try:
        ray.init(address=settings.ray_address, namespace=NAMESPACE, log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(_unreachable(settings.ray_address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _unreachable(address: str, error: ConnectionError) -> str:
    """Why there is no connection; Ray says of a wrong token only that it cannot connect."""
    message = f"no Ray cluster at {address}: {error}"
    if "RAY_AUTH_MODE" not in os.environ:
        message += "; if it asks for a token, as Ray's do by default, set RAY_AUTH_MODE=token"
    return message


def _wait_until_healthy(url: str) -> None:
    """Return when the address answers; raises StartError if it does not."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise StartError(f"{url}/health did not answer within {READY_S:.0f} s")


def _names(settings: ClusterConfig) -> str:
    return ", ".join(model.public_name for model in settings.models)


def _print_ready(settings: ClusterConfig, url: str, seconds: float) -> None:
    body = {
        "model": settings.models[0].public_name,
        "messages": [{"role": "user", "content": "Give me 3 tips for sleeping well."}],
    }
    console.print(
        f"[bold green]Ready[/bold green] after {seconds:.0f} s: {url}/v1", highlight=False
    )
    console.print("Try it:")
    console.print(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if settings.metrics.enabled:
        urls = ", ".join(f"http://{target}/metrics" for target in node_targets())
        console.print(f"Metrics for Prometheus: {urls}", highlight=False, soft_wrap=True)
        if settings.ray_address is not None and (found_at := discovery_url()):
            console.print(
                f"It finds the nodes, also new ones, at {found_at}", highlight=False, soft_wrap=True
            )
    console.print("Ctrl-C stops it.")
