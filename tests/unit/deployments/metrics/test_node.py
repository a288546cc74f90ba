"""The page of a node, with processes of its own that are killed and replaced."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.local_ray import free_port
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind, Metric
from deployments.metrics.node import (
    MAX_CONNECTIONS,
    NodePage,
    PageThread,
    remove_abandoned,
    serve_page,
)
from tests.fakes.tools import needs
from tests.fakes.waiting import wait_until

needs_promtool = needs("promtool")
READY_S = 120.0
ALL = list(catalogue.metrics())
CALLS = {Kind.COUNTER: "inc", Kind.GAUGE: "set", Kind.HISTOGRAM: "observe"}
# Runs the lines that it reads, and says so after each.
PROCESS = """
import sys
from pathlib import Path
from deployments.metrics import catalogue
from deployments.metrics.node import PageThread, open_process, write_changes
from apar_core.metrics.recorder import Recorder
lock = open_process(Path(sys.argv[1]), sys.argv[2], {"replica": sys.argv[3]} if sys.argv[3] else {})
of = Recorder(model="m", replica=sys.argv[3])
for line in sys.stdin:
    exec(line)
    write_changes()
    print("done", flush=True)
"""
REQUESTS = "of.inc(catalogue.REQUESTS, {}, key_class='k', outcome='ok')"
LATENCY = "of.observe(catalogue.REQUEST_LATENCY, {})"
STEPS = "of.inc(catalogue.ENGINE_STEPS, {})"
RESTARTS = "of.inc(catalogue.REPLICA_RESTARTS, {})"


@dataclass
class Process:
    """A process of ours that counts as it is told."""

    process: subprocess.Popen[str]

    def run(self, *lines: str) -> None:
        commands, answers = self.process.stdin, self.process.stdout
        assert commands is not None
        assert answers is not None
        for line in lines:
            commands.write(f"{line}\n")
            commands.flush()
            assert answers.readline() == "done\n", line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    yield started
    for process in started.processes:
        process.kill()


class Node:
    """A folder of processes, and its page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.page = NodePage(folder, keep_s=0.0)

    def start(self, name: str, replica: str = "") -> Process:
        command = [sys.executable, "-c", PROCESS, str(self.folder), name, replica]
        started = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(Process(started))
        return self.processes[-1]

    def value(self, name: str, **labels: str) -> float | None:
        registry = CollectorRegistry()
        registry.register(self.page)
        return registry.get_sample_value(name, labels)

    def requests(self) -> float | None:
        return self.value("apar_requests_total", model="m", key_class="k", outcome="ok")


def test_counts_of_a_node_are_those_of_all_its_processes(node: Node) -> None:
    old, new, one, two = (
        node.start("Gateway-a"),
        node.start("Gateway-b"),
        node.start("m-1", "r1"),
        node.start("m-2", "r2"),
    )
    old.run(REQUESTS.format(2), LATENCY.format(0.25), "of.set(catalogue.REPLICAS, 2)")
    new.run(REQUESTS.format(3), LATENCY.format(1.125), "of.set(catalogue.REPLICAS, 2)")
    for gateway, running in ((old, 4), (new, 5)):
        gateway.run(f"of.set(catalogue.REQUESTS_RUNNING, {running})")
    one.run(STEPS.format(7), RESTARTS.format(0))
    two.run(STEPS.format(8), RESTARTS.format(1))

    assert node.requests() == 5
    assert node.value("apar_request_latency_seconds_sum", model="m") == 1.375
    assert node.value("apar_request_latency_seconds_count", model="m") == 2
    assert node.value("apar_request_latency_seconds_bucket", model="m", le="1.0") == 1
    assert node.value("apar_request_latency_seconds_bucket", model="m", le="+Inf") == 2
    assert node.value("apar_replicas", model="m") == 2
    assert node.value("apar_requests_running", model="m") == 9
    assert node.value("apar_engine_steps_total", model="m", replica="r1") == 7
    assert node.value("apar_engine_steps_total", model="m", replica="r2") == 8
    assert node.value("apar_replica_restarts_total", model="m") == 1


def test_a_killed_gateway_leaves_its_counts_and_takes_its_gauges(node: Node) -> None:
    for number, name in enumerate(("Gateway-a", "Gateway-b", "Gateway-c")):
        gateway = node.start(name)
        gateway.run(
            REQUESTS.format(2), LATENCY.format(0.5), f"of.set(catalogue.REQUESTS_RUNNING, {number})"
        )
        assert node.requests() == 2 * (number + 1)
        gateway.kill()
        for _ in range(2):
            assert node.requests() == 2 * (number + 1)
            assert node.value("apar_request_latency_seconds_sum", model="m") == (number + 1) / 2
            assert node.value("apar_requests_running", model="m") is None
            node.page.sweep()  # Notes the end,
            node.page.sweep()  # and removes the files.
    assert sorted(path.name for path in node.folder.iterdir()) == ["ended"]


def test_a_killed_replica_disappears_but_what_it_shared_stays(node: Node) -> None:
    replica = node.start("m-1", "r1")
    replica.run(STEPS.format(7), RESTARTS.format(1), "of.set(catalogue.KV_BLOCKS, 9)")
    steps = {"model": "m", "replica": "r1"}

    replica.kill()
    last = node.value("apar_engine_steps_total", **steps)
    blocks = node.value("apar_kv_blocks", **steps)
    node.page.sweep()
    node.page.sweep()

    assert (last, blocks) == (7, None)
    assert node.value("apar_engine_steps_total", **steps) is None
    assert node.value("apar_replica_restarts_total", model="m") == 1
    node.start("m-2", "r2").run(RESTARTS.format(1))
    assert node.value("apar_replica_restarts_total", model="m") == 2


def test_a_suspended_process_is_not_swept(node: Node) -> None:
    gateway = node.start("Gateway-a")
    gateway.run(REQUESTS.format(2), "of.set(catalogue.REQUESTS_RUNNING, 4)")

    for _ in range(3):
        node.page.sweep()

    assert node.value("apar_requests_running", model="m") == 4
    gateway.run(REQUESTS.format(1))
    assert node.requests() == 3


def test_foreign_metrics_get_the_replica_and_unknown_gauges_are_left_out(node: Node) -> None:
    lines = (
        "import prometheus_client as client",
        "running = client.Gauge('vllm:running', 'R.', ['m'], multiprocess_mode='mostrecent')",
        "tokens = client.Counter('vllm:tokens', 'T.', ['m'])",
        "hidden = client.Counter('http_requests', 'H.')",
        "running.labels('a'), tokens.labels('a').inc(3), hidden.inc()",
        "of.set(catalogue.KV_BLOCKS, 9), of.set(catalogue.KV_BLOCKS, None)",
    )
    node.start("m-1", "r1").run(*lines)

    assert node.value("vllm:tokens_total", m="a", replica="r1") == 3
    # Never set, and still there: vLLM on its own would export it, too.
    assert node.value("vllm:running", m="a", replica="r1") == 0
    assert node.value("http_requests_total", replica="r1") is None
    assert node.value("apar_kv_blocks", model="m", replica="r1") is None


def test_folders_of_killed_nodes_are_removed(tmp_path: Path) -> None:
    own, used, old = (tmp_path / f"apar-metrics-{name}" for name in ("own", "used", "old"))
    (tmp_path / "other").mkdir()
    for folder in (own, used, old):
        (folder / "m-1").mkdir(parents=True)
        (folder / "m-1" / "lock").touch()

    with (used / "m-1" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_abandoned(own)
        young = {path.name for path in tmp_path.iterdir()}
        remove_abandoned(own, older_than_s=0.0)

    assert old.name in young
    assert {path.name for path in tmp_path.iterdir()} == {own.name, used.name, "other"}


def test_the_versions_are_on_the_page(node: Node) -> None:
    [build] = [family for family in node.page.collect() if family.name == "apar_build_info"]
    [sample] = build.samples

    assert sample.value == 1
    assert sample.labels["python"] == ".".join(map(str, sys.version_info[:3]))
    assert sample.labels["ray"][0].isdigit()
    assert "unknown" not in sample.labels.values()


def read(url: str) -> str:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            return httpx.get(url, timeout=5).raise_for_status().text
        except httpx.HTTPError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_another_process_serves_when_the_first_is_killed(node: Node) -> None:
    port = free_port()
    first, second = node.start("Gateway-a"), node.start("m-1", "r1")
    serve = f"page = PageThread(Path({str(node.folder)!r}), '127.0.0.1', {port})"
    first.run(REQUESTS.format(2), serve)
    assert " 2.0\n" in read(f"http://127.0.0.1:{port}/metrics")
    second.run(serve)

    first.kill()
    text = read(f"http://127.0.0.1:{port}/metrics")

    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert [sample.value for sample in found["apar_requests"].samples] == [2]
    assert found["apar_requests"].type == "counter"


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0", ""])
def test_vllms_names_are_the_same_for_every_reader(node: Node, accept: str) -> None:
    node.start("m-1", "r1").run(
        "import prometheus_client as client", "client.Counter('vllm:tokens', 'T.').inc(3)"
    )
    server = serve_page(node.page, "127.0.0.1", 0)

    address = f"http://127.0.0.1:{server.server_port}/metrics"
    text = httpx.get(address, headers={"accept": accept}).raise_for_status().text

    server.shutdown()
    server.server_close()
    assert '\nvllm:tokens_total{replica="r1"} 3.0\n' in text


@pytest.mark.ci
def test_idle_connections_take_few_threads_and_keep_no_reader_out(node: Node) -> None:
    server = serve_page(node.page, "127.0.0.1", 0)
    before = threading.active_count()

    with ExitStack() as idle:
        for _ in range(3 * MAX_CONNECTIONS):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
        text = read(f"http://127.0.0.1:{server.server_port}/metrics")
        # Threads of connections that were ended may still be ending.
        wait_until(lambda: threading.active_count() - before <= MAX_CONNECTIONS)

    server.shutdown()
    server.server_close()
    assert text.startswith("# HELP apar_build_info")


def test_the_page_on_loopback_is_not_for_other_hosts(node: Node) -> None:
    server = serve_page(node.page, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.server_port}/metrics"

    hosts = ("evil.example", f"localhost:{server.server_port}")
    statuses = [httpx.get(address, headers={"host": host}).status_code for host in hosts]

    server.shutdown()
    server.server_close()
    assert statuses == [421, 200]


def test_a_taken_port_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, attempts = free_port(), list[int]()

    def attempt(page: NodePage, host: str, port: int) -> Any:
        attempts.append(port)
        return serve_page(page, host, port)

    monkeypatch.setattr("deployments.metrics.node.serve_page", attempt)
    with holding(port):
        page = PageThread(tmp_path, "127.0.0.1", port)
        wait_until(lambda: len(attempts) >= 3)
    assert read(f"http://127.0.0.1:{port}/metrics").startswith("# HELP apar_build_info")
    page.close()

    assert [record.message for record in caplog.records] == ["metrics page not served"]


@contextmanager
def holding(port: int) -> Iterator[None]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield


@needs_promtool
def test_promtool_finds_nothing_wrong_with_our_metrics(node: Node) -> None:
    calls = (
        f"of.{CALLS[metric.kind]}(catalogue.{name}, 1, "
        f"**{ {label: 'x' for label in metric.labels if label not in ('model', 'replica')} })"
        for name, metric in vars(catalogue).items()
        if isinstance(metric, Metric) and metric in ALL and metric is not catalogue.BUILD_INFO
    )
    node.start("m-1", "r1").run("; ".join(calls))
    registry = CollectorRegistry()
    registry.register(node.page)
    text = generate_latest(registry)

    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )

    assert all(metric.name.encode() in text for metric in ALL)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    wrong = text.replace(b"apar_requests_total", b"apar_requests_count")
    assert subprocess.run(["promtool", "check", "metrics"], input=wrong, capture_output=True).stderr
