"""Connections on which nothing arrives."""

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from cluster.local_ray import free_port
from tests.integration.serving.apar_process import TINY, serving
from tests.integration.serving.load_clients import chat

pytestmark = [pytest.mark.cluster, pytest.mark.ci]
# More than the 4,096 connections that Ray lets HAProxy have.
NUM_SILENT = 4_200
HEADER_TIMEOUT_S = 20.0


def is_closed(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return link.recv(1) == b""
    except BlockingIOError:
        return False


def test_thousands_of_silent_connections_keep_no_request_out(tmp_path: Path) -> None:
    probe_port = free_port()
    limits = {"header_timeout_s": HEADER_TIMEOUT_S, "probe_port": probe_port}
    with serving(tmp_path, TINY, connections=limits) as server, ExitStack() as stack:
        port = httpx.URL(server.url).port
        assert port is not None
        opened_s = time.monotonic()
        links = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(NUM_SILENT)
        ]

        live = server.request("GET", "/live", timeout=10)
        probes = httpx.get(f"http://127.0.0.1:{probe_port}/ready", timeout=10)
        body = chat("Give me 3 tips.", "apar-tiny") | {"max_tokens": 8}
        answer = server.post("/v1/chat/completions", json=body)
        num_silent = sum(not is_closed(link) for link in links)

        assert (live.status_code, probes.status_code, answer.status_code) == (200, 200, 200)
        if time.monotonic() - opened_s < HEADER_TIMEOUT_S:
            assert num_silent == NUM_SILENT
        while not all(is_closed(link) for link in links):
            assert time.monotonic() - opened_s < HEADER_TIMEOUT_S + 30
            time.sleep(0.5)
