"""The shipped scrape configuration finds each node of a Ray cluster once."""

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.local_ray import free_port
from deployments.config.metrics import DEFAULT_PORT
from tests.fakes.rules import configured, shipped, write_yaml
from tests.integration.prometheus_process import Prometheus, needs_prometheus, prometheus
from tests.integration.serving.apar_process import session_members

pytestmark = [pytest.mark.cluster, pytest.mark.slow, needs_prometheus]
RAY = Path(sys.executable).parent / "ray"
[JOB] = shipped("prometheus.yml")["scrape_configs"]
RAY_FILE = Path(JOB["file_sd_configs"][0]["files"][0])
RAY_PATH = JOB["http_sd_configs"][0]["url"].partition(":8265")[2]
NUM_NODES = 2
WAIT_S = 120.0
# A head that finds ~/.ray/auth_token asks for it unless told not to, and its nodes bring none; and
# the tests' own settings keep Ray to one node.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}


def ports(targets: Sequence[str]) -> set[str]:
    """Return the ports of addresses, whose hosts Ray chooses."""
    return {target.rpartition(":")[2] for target in targets}


@dataclass(frozen=True)
class RayCluster:
    """Metric ports of the nodes, and the target list that the head keeps as file and page."""

    nodes: frozenset[str]
    file: Path
    url: str

    def targets(self) -> list[str]:
        """Return the targets in the file."""
        with suppress(OSError):
            return [
                target for part in json.loads(self.file.read_text()) for target in part["targets"]
            ]
        return []

    def wait_for_nodes(self) -> None:
        """Wait until both nodes are in the file."""
        deadline = time.monotonic() + WAIT_S
        while not self.nodes <= ports(self.targets()):
            assert time.monotonic() < deadline, self.targets()
            time.sleep(0.2)


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Start a Ray cluster with a dashboard and two nodes on this machine."""
    port, dashboard, *metrics = (free_port() for _ in range(2 + NUM_NODES))
    # Fixed ones otherwise, which any other Ray on this machine has already.
    own_ports = {
        "DASHBOARD_METRIC_PORT": str(free_port()),
        "AUTOSCALER_METRIC_PORT": str(free_port()),
    }
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
            ["sh", "-c", command],
            env=os.environ | ENVIRONMENT | own_ports,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{dashboard}{RAY_PATH}"
        yield RayCluster(frozenset(map(str, metrics)), folder / RAY_FILE.name, url)
    finally:
        for member in session_members(process.pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.wait()
        log.unlink()


def read(reader: Prometheus) -> list[str]:
    """Return the addresses of the readable targets."""
    return [each["labels"]["instance"] for each in reader.targets() if each["health"] == "up"]


def test_every_node_is_found_once_by_file_and_http(tmp_path: Path) -> None:
    with (
        # Ray's socket paths may have 107 characters.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name,
        ray_cluster(Path(name)) as cluster,
    ):
        cluster.wait_for_nodes()
        ours = configured(
            "prometheus.yml",
            file_sd_configs=[{"files": [str(cluster.file)]}],
            http_sd_configs=[{"url": cluster.url}],
        )
        # Without the port of our metrics, Ray's own are scraped, which differ by node here.
        rays = copy.deepcopy(ours)
        *rays["scrape_configs"][0]["relabel_configs"], port = ours["scrape_configs"][0][
            "relabel_configs"
        ]
        assert port["target_label"] == "__address__"
        write_yaml(tmp_path / "prometheus.yml", rays)
        with prometheus(tmp_path / "prometheus.yml", tmp_path) as reader:
            deadline = time.monotonic() + WAIT_S
            # A target under two names would be read, and counted, twice.
            while sorted(read(reader)) != sorted(cluster.targets()):
                assert time.monotonic() < deadline, (reader.targets(), cluster.targets())
                time.sleep(0.5)
            assert cluster.nodes <= ports(read(reader))
            assert len(cluster.targets()) == len(set(cluster.targets()))
        write_yaml(tmp_path / "prometheus.yml", ours)
        with prometheus(tmp_path / "prometheus.yml", tmp_path) as reader:
            # Both nodes have one address.
            while (targets := [each["labels"] for each in reader.targets()]) == []:
                assert time.monotonic() < deadline
                time.sleep(0.5)
            hosts = {target.rpartition(":")[0] for target in cluster.targets()}
            assert {each["instance"] for each in targets} == {
                f"{host}:{DEFAULT_PORT}" for host in hosts
            }
            assert {each["job"] for each in targets} == {"apar"}
            assert {each["cluster"] for each in targets} == {"default"}
