"""`apar serve` runs the application on a Ray cluster; `apar rollout` reloads its configuration.

A server writes its process id to a state file. `apar rollout` finds it there, sends a SIGHUP and
reads the outcome from the same file.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import httpx
import psutil
import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from apar_core.errors import AparError
from apar_core.formats.shipped_formats import SHIPPED
from apar_core.models.smollm2 import APAR_SMOLLM2
from apar_core.whole_files import replace_file
from cluster.cli.options import MODEL_HELP, Duration, duration_option, preset_names, read_format
from cluster.cli.terminal import clear_errors, fail
from cluster.durations import format_duration
from cluster.haproxy import haproxy_folder, replace_certificate
from cluster.local_ray import local_ray, reap_orphans
from deployments.config import ClusterConfig, ConfigError, StartError, load_config
from deployments.config.model import DEFAULT_MODEL, served_by_default
from deployments.logs import shown_logs
from deployments.metrics.targets import (
    check_targets_file,
    discovery_url,
    node_targets,
    write_targets,
)
from deployments.private_files import own_folder
from deployments.serve_flags import NAMESPACE

READY_S = 60.0
REAP_PERIOD_S = 5.0
POLL_S = 0.2
_TERMINAL = Path("/dev/tty")
console = Console()

Load = Callable[[], ClusterConfig]


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help=MODEL_HELP,
            autocompletion=preset_names,
            show_default=f"the file's; without a file {APAR_SMOLLM2.name} if it is fetched, else "
            f"{DEFAULT_MODEL}",
        ),
    ] = None,
    model_option: Annotated[
        str | None,
        typer.Option(
            "--model", help="The same as the argument MODEL.", autocompletion=preset_names
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port to listen on.", show_default="8000"),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 0.0.0.0 for all networks.", show_default="127.0.0.1"
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Number of replicas.", show_default="1")
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Limit on the running requests of a replica; more wait.",
            show_default="the preset's",
        ),
    ] = None,
    parallel_format: Annotated[
        str | None,
        typer.Option(
            help="Name of the model's format, or a YAML file that defines it; `lists` lets any "
            "instruct model fork, at the items of its lists.",
            autocompletion=lambda: list(SHIPPED),
            show_default="recognised by the model's tokens",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with these and further settings.")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Address of a running Ray cluster, or `auto` to find it.",
            show_default="a private one",
        ),
    ] = None,
    allow_anonymous: Annotated[
        bool,
        typer.Option(
            "--allow-anonymous",
            help="Allow requests without an API key. Needed if other machines can reach --host "
            "and the file has no keys.",
        ),
    ] = False,
) -> None:
    """Serve one model, or those of a file, with an OpenAI-compatible HTTP API.

    Starts a private Ray cluster, a gateway and the models' replicas, and prints the address when
    they are ready. Ctrl-C stops everything. Without a model it serves a small real one, or the
    embedded one before [bold]apar fetch[/bold]. [bold]apar config schema[/bold] describes the file.
    Examples:

    [bold]apar serve ./my-checkpoint --replicas 2[/bold]

    [bold]apar serve Qwen/Qwen3-8B --parallel-format lists[/bold]

    [bold]apar serve --config serve.yaml[/bold]
    """
    if None not in (model, model_option) and model != model_option:
        raise typer.BadParameter(
            f"MODEL is {model} and --model is {model_option}; give one of them. "
            "A file (--config) serves several models."
        )
    model = model or model_option
    overrides = {
        "port": port,
        "host": host,
        "ray_address": ray_address,
        "allow_anonymous": allow_anonymous or None,
    }
    if model is None and config is None:
        model = served_by_default()

    def load() -> ClusterConfig:
        model_overrides = {
            "checkpoint": model,
            "replicas": replicas,
            "max_concurrency": max_concurrency,
            "parallel_format": parallel_format and read_format(parallel_format),
        }
        settings = load_config(config, overrides, model_overrides)
        for served in settings.models:
            served.check_checkpoint()
        settings.check_keys_file()
        if settings.ray_address is None:
            # The processes of a private cluster have this one's environment and files.
            settings.check_secrets()
        return settings

    with clear_errors():
        settings = load()
        check_targets_file(settings.metrics.targets_file)
        _check_address(settings)
        signals = ServeSignals()
        run(settings, signals, lambda service, port: _watch(service, port, signals, load, config))


def _check_address(settings: ClusterConfig) -> None:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    ports = {"--port": settings.port, "`connections.probe_port`": settings.connections.probe_port}
    for option, port in ports.items():
        if port is None:
            continue
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.host, port))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {settings.host}:{port}: {error.strerror or error}"
                    f"{_address_remedy(error, option, port)}"
                ) from error


def _address_remedy(error: OSError, option: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            state = read_state(state_path(port))
            by = "" if state is None else f" by the `apar serve` with process id {state.pid}"
            return f"{by}; choose another port with {option}, for example {port + 1}"
        case errno.EACCES:
            return f"; choose a port from 1024 on with {option}"
        case _:
            return "; choose an address of this machine with --host"


def run(
    settings: ClusterConfig, signals: ServeSignals, wait: Callable[[Any, int | None], None]
) -> None:
    """Serve until `wait` returns or a signal arrives; stops everything that it started.

    `wait` gets the service and the port of the nodes' metrics, None if there are none.
    """
    signals.install()
    try:
        with _cluster(settings) as metrics_port, shown_logs(settings, sys.stderr):
            signals.install()  # Ray has installed its own handlers.
            # Importing Ray Serve takes seconds.
            from deployments.app.service import running_service

            names = ", ".join(model.public_name for model in settings.models)
            console.print(f"Starting {names} ...", markup=False)
            started = time.monotonic()
            with running_service(settings) as service:
                _wait_until_healthy(service.url)
                _print_ready(settings, service.url, time.monotonic() - started, metrics_port)
                signals.serves = True
                try:
                    wait(service, metrics_port)
                except BaseException:
                    if signals.stopping:
                        _drain(service)
                    raise
    except StopSignal:
        console.print("Stopped.")
    except Exception:
        # Raised during Ray's C code, the signal's exception appears as a SystemError.
        if not signals.stopping:
            raise
        console.print("Stopped.")


def _drain(service: Any) -> None:
    seconds = service.config.drain_s
    console.print(
        f"Stopping: running requests have {seconds:.0f} s to finish. "
        "Press Ctrl-C again to stop at once.",
        soft_wrap=True,
        highlight=False,
    )
    if cut := service.drain():
        console.print(f"{cut} unfinished requests ended with an error.", highlight=False)


def _watch(
    service: Any,
    metrics_port: int | None,
    signals: ServeSignals,
    load: Load,
    config: Path | None,
) -> None:
    """Serve forever; roll out the file whenever a SIGHUP asks for it."""
    own = frozenset(child.pid for child in psutil.Process().children())
    path = state_path(service.config.port)
    state = ServerState.of_this_process(config)
    write_state(path, state)
    file = service.config.metrics.targets_file
    next_reap = time.monotonic()
    try:
        while True:
            time.sleep(POLL_S)
            if time.monotonic() >= next_reap:
                reap_orphans(own)
                if file is not None and metrics_port is not None:
                    with suppress(OSError):  # It was writable when the server started.
                        write_targets(file, node_targets(metrics_port))
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
    """Return whether the file's settings are served now, and a message for the user."""
    if config is None:
        return False, "No rollout: this server was started without --config."
    try:
        settings = load()
        # Also if no setting has changed: the files may have been renewed.
        if (pem := settings.tls.read_pem()) is not None:
            replace_certificate(haproxy_folder(), pem)
        changed: list[str] = service.rollout(settings)
    except AparError as error:
        return False, f"No rollout: {error}"
    return True, f"Rolled out {config}: {'; '.join(changed) or 'nothing has changed'}."


@contextmanager
def _cluster(settings: ClusterConfig) -> Iterator[int | None]:
    """Connect to the Ray cluster, or run one; yields the port of the nodes' metrics."""
    if settings.ray_address is None:
        num_cpus = max(os.cpu_count() or 1, settings.num_replicas)
        with local_ray(
            num_cpus=num_cpus,
            host=settings.host,
            metrics=settings.metrics,
            tls=settings.tls,
            body_timeout_s=settings.limits.body_timeout_s,
            connections=settings.connections,
        ) as port:
            yield port
        return
    import ray

    try:
        ray.init(address=settings.ray_address, namespace=NAMESPACE, log_to_driver=False)
    except ConnectionError as error:
        message = f"no Ray cluster at {settings.ray_address}: {error}"
        # With a wrong token Ray only says that it cannot connect.
        if "RAY_AUTH_MODE" not in os.environ:
            message += "; if the cluster requires a token (Ray's default), set RAY_AUTH_MODE=token"
        raise ConfigError(message) from error
    try:
        yield settings.metrics_port_of_nodes
    finally:
        ray.shutdown()


def _wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            # The certificate is for the name that clients use, not for this machine.
            if httpx.get(f"{url}/health", timeout=5, verify=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise StartError(f"{url}/health did not answer within {READY_S:.0f} s")


def example_command(settings: ClusterConfig, url: str) -> str:
    """Return a `curl` command that asks the first model a question."""
    body = {
        "model": settings.models[0].public_name,
        "messages": [{"role": "user", "content": "Give me 3 tips for sleeping well."}],
    }
    authorization = '-H "Authorization: Bearer $APAR_API_KEY" ' if settings.asks_for_keys else ""
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' {authorization}"
        f"-d '{json.dumps(body)}'"
    )


def _print_ready(
    settings: ClusterConfig, url: str, seconds: float, metrics_port: int | None
) -> None:
    console.print(
        f"[bold green]Ready[/bold green] after {seconds:.0f} s: {url}/v1", highlight=False
    )
    if settings.serves_page:
        console.print(f"Web page: {url}/", highlight=False, soft_wrap=True)
    console.print("Try it:")
    console.print(example_command(settings, url), highlight=False, markup=False, soft_wrap=True)
    if metrics_port is not None:
        urls = ", ".join(f"http://{target}/metrics" for target in node_targets(metrics_port))
        console.print(f"Metrics for Prometheus: {urls}", highlight=False, soft_wrap=True)
        if settings.ray_address is not None and (found_at := discovery_url()):
            console.print(
                f"Service discovery of all nodes: {found_at}, with port {metrics_port} in place of "
                "Ray's own",
                highlight=False,
                soft_wrap=True,
            )
    console.print("Press Ctrl-C to stop.")


class StopSignal(BaseException):
    """A signal asked the server to stop. Not an Exception, so that no handler swallows it."""


class ServeSignals:
    """SIGINT and SIGTERM raise StopSignal; SIGHUP asks for a rollout.

    While the server serves, the first stop signal drains it and a second one stops it at once.
    The last one is not interrupted by others, because processes would be left behind.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.serves = False
        self._wants_rollout = False
        self._had_terminal = _has_terminal()

    def install(self) -> None:
        """Install the handlers in place of any others."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._hang_up)

    def take_rollout(self) -> bool:
        """Return whether a rollout has been asked for since the last call."""
        # A plain field: a handler may run between any two steps of the main thread, so a lock
        # could deadlock.
        wanted, self._wants_rollout = self._wants_rollout, False
        return wanted

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.serves:
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(name, signal.SIG_IGN)
        self.serves = False
        self.stopping = True
        raise StopSignal

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        # The kernel sends a SIGHUP too when the terminal is closed.
        if self._had_terminal and not _has_terminal():
            self._stop(number, frame)
        self._wants_rollout = True


def _has_terminal() -> bool:
    try:
        _TERMINAL.open("rb").close()
    except OSError:
        return False
    return True


def rollout(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8000,
    timeout: Annotated[
        float, duration_option(help="How long to wait for the end of the rollout.")
    ] = Duration.of("30m"),
) -> None:
    """Reload the configuration file of a running [bold]apar serve --config FILE[/bold].

    No request is lost, and an invalid file changes nothing. Does the same as a SIGHUP to the
    server, but waits for the outcome; exits with 1 if the old settings are still served. Example:
    [bold]apar rollout --port 8000[/bold]
    """
    with clear_errors():
        path = state_path(port)
    state = read_state(path)
    if state is None:
        fail(f"no `apar serve` of this user listens on port {port} of this machine")
    before = 0 if state.outcome is None else state.outcome.number
    os.kill(state.pid, signal.SIGHUP)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        state = read_state(path)
        if state is None:
            fail("the server has stopped")
        if state.outcome is not None and state.outcome.number > before:
            if not state.outcome.succeeded:
                fail(state.outcome.message)
            console.print(state.outcome.message, soft_wrap=True, markup=False, highlight=False)
            return
        time.sleep(POLL_S)
    fail(
        f"the rollout is still running after {format_duration(timeout)}; the server will print its "
        "outcome"
    )


class RolloutOutcome(BaseModel):
    """The outcome of a server's `number`-th rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    succeeded: bool
    message: str


class ServerState(BaseModel):
    """A running server. `started` distinguishes it from a later process with the same id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    started: float
    config: Path | None
    outcome: RolloutOutcome | None = None

    @classmethod
    def of_this_process(cls, config: Path | None) -> Self:
        """Return the state of a server that has just started."""
        process = psutil.Process()
        path = None if config is None else config.resolve()
        return cls(pid=process.pid, started=process.create_time(), config=path)

    @property
    def is_running(self) -> bool:
        """Whether the server still runs."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1
        except psutil.NoSuchProcess:
            return False


def state_path(port: int) -> Path:
    """Return the state file for a port, in a folder that only this user can access.

    Raises ConfigError if the folder belongs to somebody else.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    try:
        folder = own_folder(Path(base) / f"apar-serve-{os.getuid()}")
    except PermissionError as error:
        raise ConfigError(str(error)) from error
    return folder / f"{port}.json"


def write_state(path: Path, state: ServerState) -> None:
    """Write the state file atomically."""
    replace_file(path, state.model_dump_json())


def read_state(path: Path) -> ServerState | None:
    """Return the state of the running server, None if there is none."""
    try:
        state = ServerState.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return state if state.is_running else None
