"""A private Ray cluster for one `apar serve`, which leaves nothing behind when it ends."""

import contextlib
import ctypes
import functools
import io
import logging
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from apar_core.whole_files import replace_file
from cluster.haproxy import CONTROL_SOCKET, write_haproxy_wrapper
from deployments.config import ConfigError, StartError
from deployments.config.connections import ConnectionsConfig
from deployments.config.limits import BODY_TIMEOUT_S
from deployments.config.metrics import DEFAULT_PORT, MetricsConfig
from deployments.config.tls import TlsConfig
from deployments.metrics.node import PageThread, this_node
from deployments.private_files import own_folder
from deployments.serve_flags import HAPROXY_SETTINGS, LOOPBACK, NAMESPACE, SERVE_FLAGS

logger = logging.getLogger(__name__)

_NO_METRICS = MetricsConfig(enabled=False)
_NO_TLS = TlsConfig()
_CONNECTIONS = ConnectionsConfig()
_PR_SET_CHILD_SUBREAPER = 36
_TERMINATE_S = 3.0
_KILL_S = 5.0
# Above Ray's worker ports, below Ray Serve's replica ports, and below Linux's default range of
# ephemeral ports (net.ipv4.ip_local_port_range).
_STABLE_PORTS = range(20_000, 30_000)
_OBJECT_STORE_BYTES = 128 * 2**20
# In the private folder of a server. Ray gives everybody access to `_RAY`.
_RAY = "ray"
_TEMPORARY = "tmp"
_TOKEN = "auth_token"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# Folders with the logs of servers that did not start, and how many of them are kept.
_KEPT = "apar-failed-"
_NUM_KEPT = 5
# Least space for Ray's files and logs.
_NEEDED_BYTES = 32 * 2**20

# Names in Linux's abstract namespace, which the kernel frees when this process ends.
_reservations: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now.

    It is outside the range of ephemeral ports if possible: one of Ray's many outgoing connections
    could otherwise take it before the caller listens on it. While this process runs, `free_port`
    returns the port to no other process: servers that start at once would otherwise collide.
    """
    ports = list(_STABLE_PORTS)
    random.SystemRandom().shuffle(ports)
    for port in (*ports, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            reservation = socket.socket(socket.AF_UNIX)
            try:
                reservation.bind(f"\0apar-port-{found}")
            except OSError:
                reservation.close()
                continue
            _reservations.append(reservation)
            return found
    raise OSError("no TCP port of 127.0.0.1 is free")


def serve_environment(folder: Path) -> dict[str, str]:
    """Return Ray Serve's settings for speed, limits, loopback and fast shutdown.

    They must be set before `ray.serve` is imported. HAProxy accepts the connections, gateway and
    replicas run in Ray Serve's own event loop, and calls between them use gRPC. `folder` is for
    HAProxy's files: a script, a key and a socket, to which no other user may have access.
    """
    flags = SERVE_FLAGS | HAPROXY_SETTINGS
    return flags | {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Our metrics do not pass through Ray's agent.
        "RAY_enable_metrics_collection": "0",
        # Ray's GCS keeps the last 100,000 calls of actors for Ray's state API: 0.8 MiB a minute.
        "RAY_task_events_report_interval_ms": "0",
        # Ray would end an engine when the machine's memory is nearly full, and start it again, for
        # ever. The kernel ends a process only when memory is really short.
        "RAY_memory_monitor_refresh_ms": "0",
        # Reports between nodes, ten a second by default; this cluster has one node.
        "RAY_raylet_report_resources_period_milliseconds": "1000",
        "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
        "RAY_raylet_check_gc_period_milliseconds": "2000",
        "RAY_kill_idle_workers_interval_ms": "2000",
        "RAY_debug_dump_period_milliseconds": "60000",
        "RAY_io_context_event_loop_lag_collection_interval_ms": "0",
        # Statistics of event loops, which nothing shows, take a fifth of an idle actor's CPU time.
        "RAY_event_stats": "0",
        # Each report reads the statistics of every worker; nothing shows them.
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
        # The only way to make all of Ray, metrics included, listen on loopback only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # By default Ray's workers, and so our engines, run at a lower priority.
        "RAY_worker_niceness": "0",
        # At its default, Ray Serve's controller uses 4 % of a core.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        # At its default, updating counters that nothing exports takes 0.7 % of a core, 10 times a
        # second in each of three processes.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        # HAProxy is restarted after three failed checks; with the default period, after 30 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # A start on a busy machine takes longer than the default of 5 s, and would fail.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        # While the gateway does not answer, HAProxy sends requests to this port of Ray Serve's own
        # proxy. That proxy sets SO_REUSEPORT, so with the fixed default port, two servers on one
        # machine would answer each other's requests.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / CONTROL_SOCKET),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(folder / "haproxy"),
        # A stopping gateway stays reachable until HAProxy has been reloaded without it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
    }


def metrics_port(metrics: MetricsConfig) -> int:
    """Return the port for a private cluster's metrics.

    Raises ConfigError if the configured port is taken.
    """
    if metrics.port == 0:
        return free_port()
    port = metrics.port or DEFAULT_PORT
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if metrics.port is None:
                return free_port()
            raise ConfigError(
                f"metrics.port: cannot listen on 127.0.0.1:{port}: {error.strerror}"
            ) from error
    return port


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        logger.warning("prctl failed", extra={"errno": ctypes.get_errno()})


def end_descendants(keep: frozenset[int] = frozenset()) -> None:
    """Terminate, then kill, every descendant except `keep`; none is left on return."""
    for _ in range(3):  # Others may have been started meanwhile.
        children = [
            child for child in psutil.Process().children(recursive=True) if child.pid not in keep
        ]
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        _, alive = psutil.wait_procs(children, timeout=_TERMINATE_S)
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=_KILL_S)
        _reap()


def reap_orphans(own: frozenset[int]) -> None:
    """Reap adopted descendants that have ended, but none of `own`."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


# Processes of a Ray head node that a private cluster does without: the log monitor, the autoscaler
# and Ray's HTTP API. Nothing reads what workers print, no node is ever added, and nobody asks the
# API. They would take 290 MB and 1.4 % of a core.
_UNNEEDED = ("start_log_monitor", "start_monitor", "start_api_server")


@contextlib.contextmanager
def _own_ways_of_starting() -> Iterator[None]:
    """Make Ray start its processes in process groups of their own, and none of `_UNNEEDED`.

    Otherwise a SIGTERM to our process group would end them before we can drain: Ray's GCS dies
    first, and Ray then ends this process without its clean-up.
    """
    from ray._private import services as ray_services
    from ray._private.node import Node

    services: Any = ray_services
    popen, started = services.ConsolePopen, {name: getattr(Node, name) for name in _UNNEEDED}
    services.ConsolePopen = functools.partial(popen, process_group=0)
    for name in _UNNEEDED:
        setattr(Node, name, lambda _node, **_: None)
    try:
        yield
    finally:
        services.ConsolePopen = popen
        for name, method in started.items():
            setattr(Node, name, method)


# Settings for nodes of other clusters. Here, the configuration file limits connections, and Ray
# always asks for its token: every account can connect to Ray's ports of the loopback interface.
_OF_OTHER_CLUSTERS = ("RAY_SERVE_HAPROXY_MAXCONN", "APAR_HAPROXY_MAX_PER_SOURCE", "RAY_AUTH_MODE")


def _private_environment(folder: Path) -> dict[str, str]:
    """Return settings that keep the files of libraries from other users.

    `folder` gets temporary files, such as the sockets between the processes of an engine, and the
    token of this cluster. Ray itself would write one to the home that everybody can read.
    """
    temporary = own_folder(folder / _TEMPORARY)
    token = replace_file(folder / _TOKEN, secrets.token_hex(32), mode=0o600)
    settings = {"TMPDIR": str(temporary), "RAY_AUTH_TOKEN_PATH": str(token)}
    # PyTorch executes what it finds in its cache, by default a folder of `/tmp` with a predictable
    # name. Without a usable home, each server compiles into its temporary folder.
    if _COMPILED not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        compiled = Path(home).absolute() / "apar" / "torchinductor"
        with contextlib.suppress(OSError):
            compiled.parent.mkdir(parents=True, exist_ok=True)
            settings[_COMPILED] = str(own_folder(compiled))
    return settings


def _check_space(folder: Path) -> None:
    """Raise StartError if the disk is full: Ray would try to start its workers for minutes."""
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise StartError(
            f"{folder} has {free / 2**20:.0f} MiB free, and a server needs at least "
            f"{_NEEDED_BYTES // 2**20} MiB there; free some disk space"
        )


def _with_kept_logs(message: str, folder: Path) -> str:
    """Keep the logs of a cluster that did not start, and name their new place in a message.

    They move out of the cluster's folder, which is deleted. Older ones of this user are removed.
    """
    logs = (folder / _RAY / "session_latest").resolve() / "logs"
    if not logs.is_dir():
        return message
    kept = Path(tempfile.mkdtemp(prefix=_KEPT, dir=folder.parent))
    logs.rename(kept / "logs")
    own = [path for path in kept.parent.glob(f"{_KEPT}*") if path.lstat().st_uid == os.geteuid()]
    for path in sorted(own, key=lambda path: path.lstat().st_mtime)[:-_NUM_KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    if str(logs) in message:
        return message.replace(str(logs), str(kept / "logs"))
    return f"{message}\nLogs: {kept / 'logs'}"


def _forget_token() -> None:
    """Let Ray read its token again: each private cluster has another one."""
    from ray import _raylet

    raylet: Any = _raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def local_ray(
    *,
    num_cpus: int,
    host: str = LOOPBACK,
    metrics: MetricsConfig = _NO_METRICS,
    tls: TlsConfig = _NO_TLS,
    body_timeout_s: float = BODY_TIMEOUT_S,
    connections: ConnectionsConfig = _CONNECTIONS,
) -> Iterator[int | None]:
    """Run a Ray cluster on loopback, without a dashboard; yields the port of its metrics.

    HAProxy listens on `host` and waits for small bodies for at most `body_timeout_s`.

    Raises ConfigError if the metrics port is taken, and StartError if Ray does not start, for
    example because another server has taken a port meanwhile. A StartError in the block gets the
    place of Ray's logs, which are kept. Raises RuntimeError if `ray.serve`
    was imported without SERVE_FLAGS, which it reads on import; handles would be much slower.

    All files lie in one folder that only this user can access. Ray gets a folder in it: it gives
    everybody all rights to its temporary folder, and the folder above keeps them out. The path is
    short because Ray's socket paths are limited to 107 characters.
    """
    if "ray.serve" in sys.modules and SERVE_FLAGS.items() - os.environ.items():
        raise RuntimeError("ray.serve was imported before its settings were in the environment")
    port = metrics_port(metrics) if metrics.enabled else None
    outer_environment = dict(os.environ)
    before = frozenset(child.pid for child in psutil.Process().children(recursive=True))
    # Python keeps what it finds first: the state of this server does not lie in the private folder.
    tempfile.gettempdir()
    _check_space(Path("/tmp"))
    folder = Path(tempfile.mkdtemp(prefix="apar-", dir="/tmp"))
    adopt_orphans()
    try:
        write_haproxy_wrapper(
            folder / "haproxy",
            tls.read_pem(),
            host=host,
            body_timeout_s=body_timeout_s,
            connections=connections,
        )
        os.environ.update(serve_environment(folder) | _private_environment(folder))
        for name in _OF_OTHER_CLUSTERS:
            os.environ.pop(name, None)
        import ray

        _forget_token()
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            with _own_ways_of_starting():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    namespace=NAMESPACE,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder / _RAY),
                )
        except Exception as error:  # Ray has no exception class for this.
            raise StartError(f"Ray did not start: {type(error).__name__}: {error}") from error
        counts = this_node()
        page = None if port is None else PageThread(counts, "127.0.0.1", port)
        try:
            yield port
        finally:
            if page is not None:
                page.close()
            # Discard what it prints while its processes end.
            with contextlib.redirect_stdout(io.StringIO()):
                ray.shutdown()
            end_descendants(keep=before)
            shutil.rmtree(counts, ignore_errors=True)
    except StartError as error:
        raise StartError(_with_kept_logs(str(error), folder)) from error
    finally:
        end_descendants(keep=before)
        os.environ.clear()
        os.environ.update(outer_environment)
        shutil.rmtree(folder, ignore_errors=True)
        _forget_token()
