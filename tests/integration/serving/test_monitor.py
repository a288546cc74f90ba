"""`apar monitor` on a loaded server."""

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.local_ray import free_port
from tests.fakes.apar_command import APAR
from tests.integration.serving.apar_process import TINY, serving
from tests.integration.serving.load_clients import under_load

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WAIT_S = 60.0


@contextmanager
def loaded(url: str, num_clients: int) -> Iterator[None]:
    """Run clients in another thread of this process."""
    begun, enough = threading.Event(), threading.Event()

    async def work() -> None:
        async with under_load(url, num_clients=num_clients):
            begun.set()
            await asyncio.to_thread(enough.wait)

    executor = threading.Thread(target=lambda: asyncio.run(work()))
    executor.start()
    assert begun.wait(WAIT_S)
    try:
        yield
    finally:
        enough.set()
        executor.join()


def run(*arguments: str) -> dict[str, Any]:
    """Run a command and return the JSON of its last line."""
    done = subprocess.run([*APAR, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_loaded_cluster_is_shown_as_it_is(tmp_path: Path) -> None:
    port = free_port()
    page = f"127.0.0.1:{port}"
    once = ("monitor", "--metrics", page, "--once", "--json", "--interval", "1s")
    with serving(tmp_path, TINY | {"replicas": 2}, metrics={"port": port}) as server:
        with loaded(server.url, 8):
            time.sleep(6)
            shown = run("monitor", "--metrics", page, "--once", "--json", "--interval", "8s")
            # At any one moment an engine may have nothing to do.
            readings = [shown, *(run(*once) for _ in range(4))]
        text = subprocess.run(
            [*APAR, "monitor", "--metrics", page, "--once"], capture_output=True, text=True,
            check=True,
        ).stdout  # fmt: skip

    (model,) = shown["models"]
    assert (model["model"], model["replicas"]) == ("apar-tiny", 2)
    assert len(shown["replicas"]) == 2
    assert 0 < max(each["models"][0]["running"] for each in readings) <= 8
    assert model["error_share"] == 0
    assert model["tokens_per_s"] > 0
    assert model["tokens_per_s"] == pytest.approx(
        sum(each["tokens_per_s"] for each in shown["replicas"])
    )
    # Every prompt asks for a list, of which the model forks every item.
    assert 2 <= model["forks_per_s"]["accepted"] / model["requests_per_s"] <= 8
    assert 0.1 < model["attention_saved"] < 0.7
    assert 0.1 < model["cache_saved"] < 0.7
    assert 0 < model["latency_s"]["p50"] <= model["latency_s"]["p99"] < WAIT_S
    assert 0 < model["token_s"]["p50"] < model["latency_s"]["p50"]
    for place in range(2):
        replica = [each["replicas"][place] for each in readings]
        assert 0 < max(each["kv_share"] for each in replica) < 1
        assert max(each["running"] + each["waiting"] for each in replica) > 0
    assert "apar-tiny" in text
    assert "none" in text  # rejected


def test_a_watch_goes_on_through_a_restart_of_the_server(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "watched"
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()

    def wait_for(condition: Any) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while True:
            lines = [json.loads(line) for line in log.read_text().splitlines()[:-1]]
            if lines and condition(lines[-1]):
                return dict(lines[-1])
            assert watching.poll() is None, "the monitor has ended"
            assert time.monotonic() < deadline, lines[-1:]
            time.sleep(0.2)

    with serving(first, TINY, metrics={"port": port}), log.open("w") as output:
        watching = subprocess.Popen(
            [*APAR, "monitor", "--metrics", f"127.0.0.1:{port}", "--json", "--interval", "0.5s"],
            stdout=output,
        )
        before = wait_for(lambda shown: shown["replicas"])
    try:
        wait_for(lambda shown: shown["silence"] is not None)
        with serving(second, TINY, metrics={"port": port}):
            after = wait_for(lambda shown: shown["silence"] is None and shown["replicas"])
    finally:
        watching.send_signal(2)
        assert watching.wait(timeout=WAIT_S) == 0

    assert after["replicas"][0]["replica"] != before["replicas"][0]["replica"]
    assert not after["replicas"][0]["older"]
    assert after["trend"]
    assert all(value >= 0 for value in after["trend"])
