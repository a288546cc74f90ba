"""The shipped configuration finds the nodes of a real Ray cluster, each once."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.local_ray import free_port
from dashboards.prometheus import RuleSettings
from dashboards.prometheus.files import own_files, write
from dashboards.prometheus.notifying import NotifySettings
from dashboards.prometheus.scraping import CLUSTER, RAY_DASHBOARD, RAY_FILE
from tests.integration.prometheus_process import Prometheus, needs_prometheus, prometheus
from tests.integration.serving.apar_process import session_members

pytestmark = [pytest.mark.cluster, pytest.mark.slow, needs_prometheus]
RAY = Path(sys.executable).parent / "ray"
NUM_NODES = 2
WAIT_S = 120.0


@dataclass(frozen=True)
class RayCluster:
    """Addresses of its nodes' metrics, and their list, which the head keeps as file and page."""

    nodes: tuple[str, ...]
    file: Path
    url: str

    def targets(self) -> list[str]:
        """What the file says now."""
        with suppress(OSError):
            return [
                target for part in json.loads(self.file.read_text()) for target in part["targets"]
            ]
        return []

    def wait_for_nodes(self) -> None:
        """Return when both nodes stand in the file, beside Ray's dashboard and autoscaler."""
        deadline = time.monotonic() + WAIT_S
        while len(self.targets()) < NUM_NODES + 1:
            assert time.monotonic() < deadline, self.targets()
            time.sleep(0.2)


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """A cluster with a dashboard and two nodes on this machine, as `ray start` makes it."""
    port, dashboard, *metrics = (free_port() for _ in range(2 + NUM_NODES))
    common = (
        f"--node-ip-address 127.0.0.1 --num-cpus 1 --object-store-memory {80 * 2**20} "
        "--disable-usage-stats"
    )
    command = (
        f"{RAY} start --head --port {port} --temp-dir {folder} --include-dashboard true "
        f"--dashboard-host 127.0.0.1 --dashboard-port {dashboard} "
        f"--metrics-export-port {metrics[0]} {common} && "
        f"{RAY} start --address 127.0.0.1:{port} --metrics-export-port {metrics[1]} {common} && "
        "sleep infinity"
    )
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        name = Path(RAY_FILE).name
        path = RAY_DASHBOARD.partition("8265")[2]
        nodes = tuple(f"127.0.0.1:{number}" for number in metrics)
        yield RayCluster(nodes, folder / name, f"http://127.0.0.1:{dashboard}{path}")
    finally:
        for member in session_members(process.pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.wait()
        log.unlink()


def read(reader: Prometheus) -> list[str]:
    """Addresses of the targets that can be read."""
    return [each["labels"]["instance"] for each in reader.targets() if each["health"] == "up"]


def test_every_node_is_found_once_by_file_and_http(tmp_path: Path) -> None:
    with (
        # Ray's socket paths may have 107 characters.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name,
        ray_cluster(Path(name)) as cluster,
    ):
        cluster.wait_for_nodes()
        found = {"discovery_files": (str(cluster.file),), "discovery_urls": (cluster.url,)}
        scraping = CLUSTER.model_copy(update=found | {"scrape_s": 1})
        write(own_files(scraping, RuleSettings(), NotifySettings()), tmp_path)
        with prometheus(tmp_path / "prometheus.yml", tmp_path) as reader:
            deadline = time.monotonic() + WAIT_S
            # A target under two names would be read, and counted, twice.
            while sorted(read(reader)) != sorted(cluster.targets()):
                assert time.monotonic() < deadline, (reader.targets(), cluster.targets())
                time.sleep(0.5)
            assert set(cluster.nodes) <= set(read(reader))
            assert len(cluster.targets()) == len(set(cluster.targets()))
