"""Processes and HAProxy's configuration; Ray itself is in the integration tests."""

import csv
import io
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import psutil
import pytest

from cluster.haproxy import replace_certificate, write_haproxy_wrapper
from cluster.local_ray import (
    adopt_orphans,
    end_descendants,
    free_port,
    local_ray,
    reap_orphans,
    serve_environment,
)
from deployments.config import ClusterConfig, StartError
from deployments.config.connections import ConnectionsConfig
from deployments.config.files import SecretError
from deployments.config.tls import TlsConfig
from deployments.serve_flags import HAPROXY_SETTINGS, SERVE_FLAGS
from tests.fakes.tools import needs

# A process that ignores SIGTERM, started by one that ends at once, so that it is an orphan.
# It says when it is ready.
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready', flush=True); time.sleep(60)"
)
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])"


def descendants() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.ci
def test_orphans_that_ignore_the_first_signal_are_ended_too() -> None:
    keep = frozenset(child.pid for child in descendants())
    adopt_orphans()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
    assert [child for child in descendants() if child.pid not in keep]

    end_descendants(keep=keep)

    assert [child for child in descendants() if child.pid not in keep] == []


def test_only_adopted_zombies_are_reaped() -> None:
    own = subprocess.Popen([sys.executable, "-c", "pass"])
    stranger = subprocess.Popen([sys.executable, "-c", "pass"])
    for process in (own, stranger):
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)

    reap_orphans(frozenset({own.pid}))

    assert psutil.pid_exists(own.pid)
    assert not psutil.pid_exists(stranger.pid)
    own.wait()


def test_the_wrapper_corrects_haproxys_configuration(tmp_path: Path) -> None:
    config, wrapper = tmp_path / "c.cfg", tmp_path / "haproxy"
    config.write_text(
        "    stats socket /a/a.sock mode 666 level admin expose-fd listeners\n"
        "    option splice-request\n    option splice-response\n"
        "    bind :9101\n    bind *:8404\n    bind 10.0.0.1:8000\n"
    )
    write_haproxy_wrapper(wrapper)

    # HAProxy itself refuses this file; the wrapper has done its part by then.
    subprocess.run([str(wrapper), "-c", "-f", str(config)], capture_output=True, check=False)

    assert config.read_text() == (
        "    stats socket /a/a.sock mode 600 level admin expose-fd listeners\n"
        "    option splice-response\n"
        "    bind 127.0.0.1:9101\n    bind 127.0.0.1:8404\n    bind 10.0.0.1:8000\n"
    )


def test_only_the_servers_address_may_be_public(tmp_path: Path) -> None:
    config, wrapper = tmp_path / "c.cfg", tmp_path / "haproxy"
    # Ray Serve's sections, with `host: 0.0.0.0`.
    config.write_text(
        "frontend prometheus\n    bind :9101\nfrontend http_frontend\n    bind *:8000\n"
        "    default_backend default_backend\nbackend default_backend\n"
        "listen stats\n  bind *:8404\n"
    )
    write_haproxy_wrapper(wrapper)

    subprocess.run([str(wrapper), "-c", "-f", str(config)], capture_output=True, check=False)

    binds = [line.strip() for line in config.read_text().splitlines() if " bind " in line]
    assert binds == ["bind 127.0.0.1:9101", "bind *:8000", "bind 127.0.0.1:8404"]


@pytest.mark.parametrize(
    ("host", "bound"),
    [("0.0.0.0", "*"), ("::", "*"), ("::1", "::1"), ("10.0.0.1", "10.0.0.1"), (None, "127.0.0.1")],
)
def test_only_haproxy_listens_on_the_configured_host(
    tmp_path: Path, host: str | None, bound: str
) -> None:
    config, wrapper = tmp_path / "c.cfg", tmp_path / "haproxy"
    config.write_text(
        "frontend prometheus\n    bind :9101\nfrontend http_frontend\n    bind 127.0.0.1:8000\n"
        "    default_backend default_backend\nbackend default_backend\n"
        "    server one 127.0.0.1:8001\nlisten stats\n  bind *:8404\n"
    )
    write_haproxy_wrapper(wrapper, b"a certificate", host=host)

    subprocess.run([str(wrapper), "-c", "-f", str(config)], capture_output=True, check=False)

    lines = [line.strip() for line in config.read_text().splitlines()]
    binds = [line for line in lines if line.startswith("bind")]
    tls = f"ssl crt {tmp_path}/tls.pem alpn http/1.1 ssl-min-ver TLSv1.2"
    assert binds == ["bind 127.0.0.1:9101", f"bind {bound}:8000 {tls}", "bind 127.0.0.1:8404"]
    assert "server one 127.0.0.1:8001" in lines


def answer_through_haproxy(folder: Path, backend: str) -> httpx.Response:
    """What a client of HAProxy gets with these lines in the backend."""
    config, wrapper, port = folder / "c.cfg", folder / "haproxy", free_port()
    config.write_text(
        "defaults\n    mode http\n    timeout connect 1s\n    timeout client 5s\n"
        "    timeout server 5s\n    errorfile 503 /nowhere/500.http\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{port}\n"
        f"    default_backend default_backend\nbackend default_backend\n{backend}"
    )
    write_haproxy_wrapper(wrapper)
    process = subprocess.Popen([str(wrapper), "-db", "-f", str(config)])
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            return client.get(f"http://127.0.0.1:{port}/v1/models")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_haproxy_sends_a_hung_gateway_nothing_after_three_failed_checks(tmp_path: Path) -> None:
    # Ray reads the settings when it is imported.
    directive = (
        "from ray.serve._private.haproxy import BackendConfig, HAProxyConfig\n"
        "backend = BackendConfig(name='b', path_prefix='/', app_name='a', servers=[])\n"
        "print(backend.build_health_check_config(HAProxyConfig())['default_server_directive'])"
    )
    checks = subprocess.run(
        [sys.executable, "-c", directive],
        env=os.environ | HAPROXY_SETTINGS,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    port, told = free_port(), tmp_path / "told"
    config, wrapper = tmp_path / "c.cfg", tmp_path / "haproxy"
    write_haproxy_wrapper(wrapper)
    with answering(200, "text/plain") as well, Hanging() as hung, ExitStack() as stack:
        # A server that is down is not checked again, so that its failed checks can be counted.
        config.write_text(
            f"global\n    stats socket {told}\n"
            "defaults\n    mode http\n    timeout connect 5s\n    timeout client 60s\n"
            "    timeout server 60s\n"
            f"frontend http_frontend\n    bind 127.0.0.1:{port}\n"
            "    default_backend default_backend\nbackend default_backend\n"
            f"    balance roundrobin\n    option httpchk GET /\n    {checks}\n"
            f"    server one {hung.address} downinter 600s\n    server two {well}\n"
        )
        stack.enter_context(ended(subprocess.Popen([str(wrapper), "-db", "-f", str(config)])))
        # A server that has just been added falls at its first failed check.
        until(lambda: hung.num_answered >= 4)
        failed_before = int(haproxy_tells(told, "one")["chkfail"])
        hung.hangs = True
        until(lambda: haproxy_tells(told, "one")["status"] == "DOWN")
        failed = int(haproxy_tells(told, "one")["chkfail"]) - failed_before
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            # In turns, so that the hung server would be among them.
            assert answers_in_a_row(client, 4)
    assert failed == 3


@pytest.mark.parametrize("body_timeout_s", [1e-6, 1e12, float("inf")])
def test_haproxy_accepts_any_time_for_bodies(tmp_path: Path, body_timeout_s: float) -> None:
    wrapper, config = tmp_path / "haproxy", tmp_path / "c.cfg"
    config.write_text(retrying(free_port(), ""))
    write_haproxy_wrapper(wrapper, body_timeout_s=body_timeout_s)

    checked = subprocess.run([str(wrapper), "-c", "-f", str(config)], capture_output=True)

    assert checked.returncode == 0, checked.stderr


def test_a_late_body_gets_an_openai_error(tmp_path: Path) -> None:
    wrapper, config, port = tmp_path / "haproxy", tmp_path / "c.cfg", free_port()
    write_haproxy_wrapper(wrapper, body_timeout_s=0.5)
    with answering(200, "text/plain") as well, ExitStack() as stack:
        config.write_text(retrying(port, f"    server one {well}\n"))
        stack.enter_context(ended(subprocess.Popen([str(wrapper), "-db", "-f", str(config)])))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        until(lambda: answers_in_a_row(client, 1))
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        slow.settimeout(30)

        slow.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n1234")

        head, _, body = slow.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"] == {
        "message": "The body did not arrive within 0.5 s.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_timeout",
    }


@contextmanager
def limited(folder: Path, port: int, **connections: Any) -> Iterator[str]:
    """Run HAProxy with these limits on connections; yields its address."""
    wrapper, config = folder / "haproxy", folder / "c.cfg"
    limits = ConnectionsConfig.model_validate(connections)
    write_haproxy_wrapper(wrapper, connections=limits)
    with answering(200, "text/plain") as well, ExitStack() as stack:
        config.write_text("global\n    maxconn 10\n" + retrying(port, f"    server one {well}\n"))
        stack.enter_context(ended(subprocess.Popen([str(wrapper), "-db", "-f", str(config)])))
        until(lambda: accepts(port))
        yield f"http://127.0.0.1:{port}"


def silent(stack: ExitStack, port: int, number: int, source: str = "") -> list[socket.socket]:
    """Open connections and send nothing."""
    address, own = ("127.0.0.1", port), (source, 0)
    links = [socket.create_connection(address, source_address=own) for _ in range(number)]
    return [stack.enter_context(link) for link in links]


def is_closed(link: socket.socket) -> bool:
    """Return whether the other side has closed a connection, without sending anything."""
    link.settimeout(0.1)
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_silent_connections_keep_nobody_out_for_longer_than_their_timeout(tmp_path: Path) -> None:
    port = free_port()
    with (
        limited(tmp_path, port, max_open=20, header_timeout_s=1.0) as url,
        ExitStack() as stack,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        until(lambda: answers_in_a_row(client, 1))
        idle = silent(stack, port, 40)
        began_s = time.monotonic()

        assert httpx.get(url, timeout=20).status_code == 200

        assert time.monotonic() - began_s < 10
        until(lambda: all(is_closed(link) for link in idle))
        # An idle connection that has been used stays open.
        assert client.get("/").status_code == 200


def test_a_head_that_stops_is_answered_after_its_timeout(tmp_path: Path) -> None:
    port = free_port()
    with limited(tmp_path, port, header_timeout_s=0.5), ExitStack() as stack:
        (slow,) = silent(stack, port, 1)

        slow.sendall(b"GET / HTTP/1.1\r\nhos")

        slow.settimeout(30)
        assert slow.makefile("rb").read().startswith(b"HTTP/1.1 408 ")


def test_connections_without_a_further_request_are_closed(tmp_path: Path) -> None:
    port = free_port()
    with limited(tmp_path, port, idle_timeout_s=0.5) as url, ExitStack() as stack:
        until(lambda: httpx.get(url).status_code == 200)
        (link,) = silent(stack, port, 1)
        link.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b" 200 OK" in link.recv(10_000)

        until(lambda: is_closed(link))


def test_one_source_cannot_take_all_connections(tmp_path: Path) -> None:
    port = free_port()
    limits = {"max_open": 40, "max_per_source": 5, "unlimited_sources": ["127.0.0.3"]}
    with limited(tmp_path, port, **limits) as url, ExitStack() as stack:
        until(lambda: httpx.get(url).status_code == 200)

        first = silent(stack, port, 8, "127.0.0.2")
        proxy = silent(stack, port, 8, "127.0.0.3")

        until(lambda: sum(is_closed(link) for link in first) == 3)
        assert not any(is_closed(link) for link in proxy)
        assert httpx.get(url).status_code == 200


def test_probes_are_answered_while_all_connections_are_taken(tmp_path: Path) -> None:
    port, probe_port = free_port(), free_port()
    limits = {"max_open": 20, "header_timeout_s": 60.0, "probe_port": probe_port}
    with limited(tmp_path, port, **limits) as url, ExitStack() as stack:
        until(lambda: httpx.get(url).status_code == 200)
        silent(stack, port, 40)
        with pytest.raises(httpx.TimeoutException):
            httpx.get(url, timeout=1)

        probes = f"http://127.0.0.1:{probe_port}"
        statuses = {path: httpx.get(probes + path).status_code for path in ("/live", "/v1/models")}

    assert statuses == {"/live": 200, "/v1/models": 404}


def test_the_wrapper_corrects_a_configuration_once_and_within_the_limit_on_files(
    tmp_path: Path,
) -> None:
    wrapper, config = tmp_path / "haproxy", tmp_path / "c.cfg"
    limits = ConnectionsConfig(max_open=5000, probe_port=free_port())
    write_haproxy_wrapper(wrapper, connections=limits)
    config.write_text("global\n    maxconn 10\n" + retrying(free_port(), ""))
    check = f"ulimit -n 2000; {wrapper} -c -f {config}"

    texts = []
    for _ in range(2):
        done = subprocess.run(["sh", "-c", check], capture_output=True, text=True, check=True)
        texts.append(config.read_text())

    assert "[WARNING]" not in done.stderr
    assert texts[0] == texts[1]
    # 25 files for ten connections, and 200 others; 100 connections are kept for probes.
    assert "global\n    maxconn 720\n" in texts[0]
    assert "    maxconn 620\n" in texts[0]
    assert "sc0_conn_cur gt 156 " in texts[0]


def test_the_environment_of_a_node_sets_the_limits_on_connections(tmp_path: Path) -> None:
    wrapper, config = tmp_path / "haproxy", tmp_path / "c.cfg"
    write_haproxy_wrapper(wrapper)
    config.write_text(retrying(free_port(), ""))
    limits = {"RAY_SERVE_HAPROXY_MAXCONN": "300", "APAR_HAPROXY_MAX_PER_SOURCE": "200"}

    subprocess.run([str(wrapper), "-c", "-f", str(config)], env=os.environ | limits, check=True)

    assert "    maxconn 300\n" in config.read_text()
    assert "sc0_conn_cur gt 200 " in config.read_text()


def test_a_request_that_a_dying_gateway_has_not_answered_goes_to_another(tmp_path: Path) -> None:
    wrapper, config = tmp_path / "haproxy", tmp_path / "c.cfg"
    port, other = free_port(), free_port()
    write_haproxy_wrapper(wrapper)
    with answering(200, "text/plain") as well, ExitStack() as stack:
        servers = f"    server one 127.0.0.1:{other}\n    server two {well}\n"
        config.write_text(retrying(port, servers))
        page = (sys.executable, "-m", "http.server", str(other), "--bind", "127.0.0.1")
        hung = stack.enter_context(ended(subprocess.Popen(page, cwd=tmp_path)))
        until(lambda: accepts(other))
        stack.enter_context(ended(subprocess.Popen([str(wrapper), "-db", "-f", str(config)])))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30))
        # Both servers have answered over the connections that are used next.
        until(lambda: answers_in_a_row(client, 4))
        hung.suspend()
        threads = stack.enter_context(ThreadPoolExecutor(8))
        # httpx sends the body in a packet of its own.
        answers = [threads.submit(client.post, "/", content=b"x" * 300) for _ in range(8)]
        # In turns: the other half is with the hung one.
        until(lambda: sum(answer.done() for answer in answers) >= 4)
        assert not all(answer.done() for answer in answers)

        hung.kill()

        assert {answer.result().status_code for answer in answers} == {200}


def retrying(port: int, servers: str) -> str:
    """Return a configuration with the defaults by which HAProxy retries at other servers."""
    return (
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 60s\n"
        "    timeout server 60s\n    option redispatch 1\n    http-reuse always\n"
        f"    retry-on {HAPROXY_SETTINGS['RAY_SERVE_HAPROXY_RETRY_ON']}\n"
        f"    retries {HAPROXY_SETTINGS['RAY_SERVE_HAPROXY_RETRIES']}\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{port}\n"
        "    default_backend default_backend\nbackend default_backend\n"
        f"    balance roundrobin\n{servers}"
    )


def accepts(port: int) -> bool:
    """Return whether something listens on this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[psutil.Process]:
    """Kill a process at the end."""
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


class HttpServer:
    """An HTTP server in a thread; its handlers may wait for `may_end`, which the end sets."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.may_end = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_end.set()
        self._server.shutdown()
        self._server.server_close()


class Hanging(HttpServer):
    """A server that gives no answers while it `hangs`."""

    def __init__(self) -> None:
        self.hangs = False
        self.num_answered = 0
        hanging = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if hanging.hangs:
                    hanging.may_end.wait()
                    return
                hanging.num_answered += 1
                self.send_response(200)
                self.end_headers()

        super().__init__(Handler)


def haproxy_tells(path: Path, server: str) -> dict[str, str]:
    """Return what HAProxy tells about a server through its socket."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
        asking.sendall(b"show stat\n")
        said = asking.makefile().read().removeprefix("# ")
    return next(row for row in csv.DictReader(io.StringIO(said)) if row["svname"] == server)


def answers_in_a_row(client: httpx.Client, number: int) -> bool:
    """Return whether so many requests after each other are answered in time."""
    try:
        return all(client.get("/").status_code == 200 for _ in range(number))
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def new_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-days", "1", "-subj", f"/CN={name}", "-addext",
            "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


@needs("openssl")
def test_haproxy_serves_https_with_a_certificate_that_can_be_renewed(tmp_path: Path) -> None:
    first, second = new_certificate(tmp_path, "first"), new_certificate(tmp_path, "second")
    folder, port = tmp_path / "haproxy", free_port()
    folder.mkdir()
    config, wrapper = folder / "c.cfg", folder / "haproxy"
    config.write_text(
        f"global\n    stats socket {folder}/a.sock mode 600 level admin\n"
        "defaults\n    mode http\n    timeout connect 1s\n    timeout client 5s\n"
        "    timeout server 5s\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{port}\n"
        "    default_backend default_backend\nbackend default_backend\n"
        '    http-request return status 200 content-type text/plain string "yes"\n'
    )
    pem = TlsConfig(certificate=first[0], key=first[1]).read_pem()
    write_haproxy_wrapper(wrapper, pem)

    def ask(trusted: Path) -> str:
        context = ssl.create_default_context(cafile=str(trusted))
        with httpx.Client(transport=httpx.HTTPTransport(retries=8, verify=context)) as http:
            return http.get(f"https://127.0.0.1:{port}/").text

    process = subprocess.Popen([str(wrapper), "-db", "-f", str(config)])
    try:
        assert ask(first[0]) == "yes"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/").raise_for_status()
        renewed = TlsConfig(certificate=second[0], key=second[1]).read_pem()
        assert renewed is not None
        replace_certificate(folder, renewed)
        assert ask(second[0]) == "yes"
        with pytest.raises(StartError, match="HAProxy"):
            replace_certificate(folder, b"no certificate")
        assert ask(second[0]) == "yes"
    finally:
        process.kill()
        process.wait()
    assert (folder / "tls.pem").stat().st_mode & 0o777 == 0o600


@needs("openssl")
def test_an_unusable_certificate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    certificate, key = new_certificate(tmp_path, "a")
    _, other = new_certificate(tmp_path, "b")
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())

    assert TlsConfig().read_pem() is None
    assert TlsConfig(certificate=both).read_pem() is not None
    for wrong in (
        TlsConfig(certificate=certificate),
        TlsConfig(certificate=certificate, key=other),
        TlsConfig(certificate=key, key=key),
        TlsConfig(certificate=tmp_path / "missing.pem"),
    ):
        with pytest.raises(SecretError, match="tls: ") as refused:
            wrong.read_pem()
        assert "PRIVATE" not in str(refused.value)
    with pytest.raises(ValueError, match="ingress"):
        ClusterConfig.model_validate({"ray_address": "auto", "tls": {"certificate": str(both)}})


def assert_not_ready(answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "not_ready"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("    server one 127.0.0.1:{dead}\n", id="nobody listens"),
        pytest.param(
            '    http-request return status 404 content-type text/plain lf-string "No %[path]"\n',
            id="no application yet",
        ),
    ],
)
def test_haproxys_own_errors_are_in_openais_format(tmp_path: Path, backend: str) -> None:
    assert_not_ready(answer_through_haproxy(tmp_path, backend.format(dead=free_port())))


HANDSHAKE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)


def heads_through_haproxy(folder: Path, *requests: bytes, half: bool = False) -> list[Any]:
    """Send each request; return status, headers and body of the answers, and what arrived last.

    With `half`, the client closes its side behind each request.
    """
    found = []
    with Echoing() as echo, haproxy_before(folder, echo) as port, ExitStack() as stack:
        for request in requests:
            echo.hangs = half
            link = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            link.sendall(request)
            if half:
                link.shutdown(socket.SHUT_WR)
            answer = HTTPResponse(link, method=request.partition(b" ")[0].decode("latin1"))
            answer.begin()
            found.append((answer.status, answer.headers, answer.read()))
            echo.may_end.set()
    return found


@contextmanager
def haproxy_before(folder: Path, echo: "Echoing") -> Iterator[int]:
    """Run HAProxy, configured by our wrapper, before a server; yield its port."""
    wrapper, config, port = folder / "haproxy", folder / "c.cfg", free_port()
    write_haproxy_wrapper(wrapper)
    servers = f"    option abortonclose\n    server one {echo.address}\n"
    config.write_text("global\n    maxconn 10\n" + retrying(port, servers))
    with ended(subprocess.Popen([str(wrapper), "-db", "-f", str(config)])):
        until(lambda: accepts(port))
        yield port


class Echoing(HttpServer):
    """A server that answers with the names of the headers and the body that have arrived."""

    def __init__(self) -> None:
        self.hangs = False
        self.answers_first = False
        echo = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                if echo.hangs:
                    echo.may_end.wait()
                if echo.answers_first:
                    self.send_response(200)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    self.wfile.flush()
                    self.rfile.read(int(self.headers.get("content-length", 0)))
                    return
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                names = sorted(name.lower() for name in self.headers)
                said = json.dumps({"names": names, "body": body.decode()}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST

        super().__init__(Handler)


def raw(method: str, target: str, *headers: str, body: str = "") -> bytes:
    length = [f"content-length: {len(body)}"] if body else []
    head = [f"{method} {target} HTTP/1.1", "host: a", *length, *headers, "", ""]
    return ("\r\n".join(head) + body).encode()


def test_a_websocket_handshake_is_refused_at_once(tmp_path: Path) -> None:
    ((status, headers, body),) = heads_through_haproxy(tmp_path, raw("GET", "/v1", *HANDSHAKE))

    assert status == 426
    # RFC 9110, section 15.5.22.
    assert (headers["upgrade"], headers["connection"].lower()) == ("HTTP/1.1", "upgrade")
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["error"]["code"] == "upgrade_required"


@pytest.mark.parametrize("protocol", ["websocket", "x", "h2c"])
def test_other_upgrades_are_ignored_and_the_body_arrives(tmp_path: Path, protocol: str) -> None:
    upgrade = (f"Upgrade: {protocol}", *HANDSHAKE[1:])

    ((status, _, answer),) = heads_through_haproxy(tmp_path, raw("POST", "/", *upgrade, body="yes"))

    assert status == 200
    assert json.loads(answer)["body"] == "yes"
    assert "upgrade" not in json.loads(answer)["names"]


@pytest.mark.parametrize("protocol", ["websocket", "x", "h2c"])
def test_no_request_hangs_behind_an_upgrade(tmp_path: Path, protocol: str) -> None:
    """HAProxy 2.8 stops reading such a connection if the answer comes before the whole body."""
    upgrade = (f"Upgrade: {protocol}", *HANDSHAKE[1:])
    first, second = raw("POST", "/", *upgrade, body="a" * 70_000), raw("POST", "/", body="b" * 140)
    statuses = []

    with Echoing() as echo, haproxy_before(tmp_path, echo) as port, ExitStack() as stack:
        echo.answers_first = True
        link = None
        for request in (first, second) * 3:
            if link is None:
                link = socket.create_connection(("127.0.0.1", port), timeout=30)
                stack.enter_context(link)
            link.sendall(request[:40_000])
            answer = HTTPResponse(link, method="POST")
            answer.begin()
            answer.read()
            statuses.append(answer.status)
            link.sendall(request[40_000:])
            if answer.headers["connection"] == "close":
                link = None

    assert statuses == [200] * 6


def test_requests_that_uvicorn_cannot_answer_get_openai_errors(tmp_path: Path) -> None:
    asked = (raw("GET", "nowhere"), raw("GET", "*"), raw("BREW", "/v1"))

    answers = heads_through_haproxy(tmp_path, *asked)

    errors = [json.loads(body)["error"] for _, _, body in answers]
    assert [status for status, _, _ in answers] == [400, 400, 501]
    assert [error["code"] for error in errors] == [
        "bad_request",
        "bad_request",
        "method_not_implemented",
    ]
    assert all(set(error) == {"message", "type", "param", "code"} for error in errors)


def test_the_methods_of_the_server_are_told(tmp_path: Path) -> None:
    ((status, headers, _),) = heads_through_haproxy(tmp_path, raw("OPTIONS", "*"))

    assert (status, headers["allow"]) == (204, "GET, HEAD, POST, DELETE, OPTIONS")


def test_a_url_as_target_and_many_headers_pass_haproxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("http.client._MAXHEADERS", 1000)
    asked = raw("GET", "http://a/v1"), raw("GET", "/v1", *(f"x-{n}: a" for n in range(900)))

    answers = heads_through_haproxy(tmp_path, *asked)

    assert [status for status, _, _ in answers] == [200, 200]


def test_a_client_that_closes_its_side_is_told_why_it_gets_no_answer(tmp_path: Path) -> None:
    ((status, headers, body),) = heads_through_haproxy(tmp_path, raw("GET", "/v1"), half=True)

    assert (status, headers["content-type"]) == (400, "application/json")
    assert "closed its side of the connection" in json.loads(body)["error"]["message"]


@contextmanager
def answering(status: int, content_type: str) -> Iterator[str]:
    """The address of a server that gives every request the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", "4")
            self.end_headers()
            self.wfile.write(b"null")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        executor = threading.Thread(target=server.serve_forever)
        executor.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            executor.join()


@pytest.mark.parametrize("status", [500, 503])
def test_errors_of_ray_serves_proxy_are_in_openais_format(tmp_path: Path, status: int) -> None:
    with answering(status, "text/plain; charset=utf-8") as address:
        assert_not_ready(answer_through_haproxy(tmp_path, f"    server one {address}\n"))


@pytest.mark.parametrize(
    ("status", "content_type"),
    [(200, "text/plain"), (404, "text/plain"), (500, "application/json")],
)
def test_other_answers_pass_haproxy_unchanged(
    tmp_path: Path, status: int, content_type: str
) -> None:
    with answering(status, content_type) as address:
        answer = answer_through_haproxy(tmp_path, f"    server one {address}\n")

    assert (answer.status_code, answer.text) == (status, "null")


def test_haproxys_files_stay_in_the_private_folder(tmp_path: Path) -> None:
    values = [value for key, value in serve_environment(tmp_path).items() if "HAPROXY" in key]
    known = HAPROXY_SETTINGS.values()
    paths = [value for value in values if not (value.isdecimal() or value in known)]

    assert len(paths) == 6
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)
    assert serve_environment(tmp_path).items() >= SERVE_FLAGS.items()


def test_a_free_port_is_not_an_ephemeral_one() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 30_000:
        pytest.skip(f"this machine gives outgoing connections ports from {first} on")

    assert all(20_000 <= free_port() < first for _ in range(100))


def test_processes_get_different_free_ports() -> None:
    port = free_port()
    code = (
        "from cluster import local_ray; "
        f"local_ray._STABLE_PORTS = range({port}, {port + 1}); print(local_ray.free_port())"
    )

    elsewhere = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert int(elsewhere.stdout) != port


def test_a_free_port_is_found_if_the_stable_ones_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("cluster.local_ray._STABLE_PORTS", [port])

        found = free_port()

    assert found != port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", found))


def test_ray_that_does_not_start_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise TimeoutError("no raylet")

    folder = tmp_path / "ray"
    folder.mkdir()
    monkeypatch.delitem(sys.modules, "ray.serve", raising=False)
    # The first import of Ray changes the environment.
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("cluster.local_ray.tempfile.mkdtemp", lambda **_: str(folder))
    environment = dict(os.environ)

    with (
        pytest.raises(StartError, match="Ray did not start: TimeoutError: no raylet"),
        local_ray(num_cpus=1),
    ):
        pass

    assert not folder.exists()
    assert dict(os.environ) == environment


def test_the_logs_of_a_cluster_that_did_not_start_are_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count()

    def mkdtemp(*, prefix: str, **_: object) -> str:
        folder = tmp_path / f"{prefix}{next(numbers)}"
        folder.mkdir(mode=0o700)
        return str(folder)

    def init(_temp_dir: str, **_: object) -> None:
        session = Path(_temp_dir) / "session_1"
        (session / "logs").mkdir(parents=True)
        (session / "logs" / "raylet.err").write_text("no port")
        (Path(_temp_dir) / "session_latest").symlink_to(session)
        raise TimeoutError(f"see {session}/logs/raylet.err" if names else "no raylet")

    monkeypatch.delitem(sys.modules, "ray.serve", raising=False)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("cluster.local_ray.tempfile.mkdtemp", mkdtemp)

    for names in (False, True):
        with pytest.raises(StartError) as raised, local_ray(num_cpus=1):
            pass
        place = Path(str(raised.value).rpartition(" ")[2])
        file = place if names else place / "raylet.err"
        assert file.read_text() == "no port"
        assert file.parent.parent.stat().st_mode & 0o777 == 0o700

    for _ in range(5):
        with pytest.raises(StartError), local_ray(num_cpus=1):
            pass
    assert len(list(tmp_path.iterdir())) == 5


def test_a_full_disk_is_reported_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray.serve", raising=False)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    full = SimpleNamespace(total=2**30, used=2**30, free=2**20)
    monkeypatch.setattr("cluster.local_ray.shutil.disk_usage", lambda _: full)

    with pytest.raises(StartError, match="/tmp has 1 MiB free"), local_ray(num_cpus=1):
        pass


def test_ray_serve_must_not_have_been_imported_with_other_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", sys)
    monkeypatch.delenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", raising=False)

    with pytest.raises(RuntimeError, match=r"ray\.serve"), local_ray(num_cpus=1):
        pass


def test_two_servers_on_one_machine_share_no_fallback_port(tmp_path: Path) -> None:
    names = ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT")

    ports = [serve_environment(tmp_path)[name] for name in names for _ in range(2)]

    assert len(set(ports)) == 4
