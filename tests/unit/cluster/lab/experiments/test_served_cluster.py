"""Servers of experiments: when they count as ready."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cluster.lab.experiments import served_cluster as module
from cluster.lab.experiments.served_cluster import served_cluster

STARTING_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import yaml

num_health_checks = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global num_health_checks
        is_ready = num_health_checks >= 2
        num_health_checks += self.path == "/health"
        self.send_response(503 if self.path == "/health" and not is_ready else 200)
        self.end_headers()
        self.wfile.write(b"ready" if is_ready else b"starting")


port = yaml.safe_load(Path(sys.argv[-1]).read_text())["port"]
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.slow
def test_a_server_is_ready_when_it_is_healthy_not_when_it_lists_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "APAR", ("-c", STARTING_SERVER))

    with served_cluster({"checkpoint": "apar-tiny"}, tmp_path, "serve") as served:
        assert httpx.get(f"{served.url}/v1/models").text == "ready"
