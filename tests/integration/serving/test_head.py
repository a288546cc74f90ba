"""Serving continues on a user's Ray cluster whose GCS crashes.

The GCS keeps its state in Redis, which Ray's head fault tolerance requires.
"""

import asyncio
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cluster.haproxy import write_haproxy_wrapper
from cluster.local_ray import free_port, serve_environment
from deployments.metrics import catalogue
from tests.fakes.tools import needs
from tests.integration.serving.apar_process import ENGINE, TINY, serving, session_members
from tests.integration.serving.kill_run import healthy
from tests.integration.serving.load_clients import under_load
from tests.integration.serving.metrics_reading import read_when

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    needs("redis-server"),
]
GCS = "gcs_server"
WAIT_S = 120.0
# Raylets give up a GCS that stays away for a minute.
ABSENCE_S = 15.0


@dataclass
class RayCluster:
    """A head node, started as `ray start` does it, and its Redis."""

    address: str
    leader: int

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the cluster's live processes whose program name contains `title`."""
        found = []
        for pid in session_members(self.leader):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if title in " ".join(process.cmdline()[:1]):
                    found.append(process)
        return found

    def wait_for(self, title: str, number: int) -> None:
        """Wait until this many processes are alive."""
        deadline = time.monotonic() + WAIT_S
        while len(self.processes(title)) != number:
            assert time.monotonic() < deadline, title
            time.sleep(0.2)


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Start a Ray cluster of one node that survives a crash of its GCS."""
    redis_port, port = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    command = (
        f"redis-server --port {redis_port} --save '' --bind 127.0.0.1 --dir {folder} & "
        f"{Path(sys.executable).parent / 'ray'} start --head --port {port} --temp-dir {folder} "
        "--node-ip-address 127.0.0.1 --include-dashboard false --num-cpus 4 "
        f"--object-store-memory {128 * 2**20} --disable-usage-stats && sleep infinity"
    )
    log = folder / "ray-start.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", command],
            env=os.environ | {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for_start(log, process)
        yield RayCluster(address, process.pid)
    finally:
        for member in session_members(process.pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.wait()


def _wait_for_start(log: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + WAIT_S
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    # Ray's socket paths may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="apar-", dir="/tmp"))
    write_haproxy_wrapper(folder / "haproxy")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in (serve_environment(folder) | token).items():
        monkeypatch.setenv(name, value)
    try:
        with ray_cluster(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_again(process: psutil.Process) -> "subprocess.Popen[bytes]":
    """Kill a process, wait, and start it again with the same command."""
    command, environment, folder = process.cmdline(), process.environ(), process.cwd()
    process.kill()
    time.sleep(ABSENCE_S)
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_until_it_listens(address: str) -> None:
    host, port = address.split(":")
    deadline = time.monotonic() + WAIT_S
    while True:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        assert time.monotonic() < deadline, address
        time.sleep(0.2)


async def test_serving_goes_on_while_the_head_has_no_gcs(
    tmp_path: Path, cluster: RayCluster
) -> None:
    gcs = None
    try:
        metrics = {"port": free_port()}
        model = TINY | {"replicas": 2}
        with serving(tmp_path, model, ray_address=cluster.address, metrics=metrics) as server:
            async with under_load(server.url, num_clients=8) as load:
                await asyncio.sleep(2)
                (running,) = cluster.processes(GCS)
                gcs = await asyncio.to_thread(start_again, running)
                num_without = len(load.outcomes)
                await asyncio.to_thread(wait_until_it_listens, cluster.address)
                await asyncio.sleep(5)
                # The cluster is whole again: a lost engine is replaced.
                victim = cluster.processes(ENGINE)[0]
                victim.kill()
                victim.wait()
                await asyncio.to_thread(cluster.wait_for, ENGINE, 2)
                num_before = len(load.outcomes)
                await asyncio.sleep(5)
            assert load.failures == [], load.table()
            assert 10 < num_without < num_before < len(load.outcomes)
            assert await healthy(server)
            # The processes of the node serve its metrics, after the loss of one of them, too.
            page = read_when(
                f"http://127.0.0.1:{metrics['port']}/metrics",
                lambda page: (
                    page.total(catalogue.REPLICA_RESTARTS) == 1
                    and len(page.by(catalogue.ENGINE_STEPS, "replica")) == 3
                ),
            )
            # Beside the load: the answers it is compared with, and the check of health.
            others = page.total(catalogue.REQUESTS, outcome="ok") - len(load.outcomes)
            assert 0 <= others <= 10
    finally:  # After the server, which ends by the GCS.
        if gcs is not None:
            gcs.kill()
            gcs.wait()
