"""`apar monitor` as a command."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cluster.cli.monitor import history_for
from cluster.local_ray import free_port
from cluster.monitor.series import Snapshot
from cluster.monitor.sources import PagesSource, parse_page
from deployments.metrics import catalogue
from tests.fakes.apar_command import APAR, apar
from tests.fakes.metrics_page import busy_page, served

DEADLINE_S = 120.0


@pytest.fixture
def soon_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that does not change is not waited for."""
    monkeypatch.setattr(PagesSource, "quiet_s", 0.3)


def test_once_waits_for_two_reports_and_gives_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    page = busy_page()
    with served(page.text()) as server:
        # Ten readings a second, and a report every second.
        monkeypatch.setattr("time.monotonic", lambda: server.num_asked / 10)

        def report(number: int) -> None:
            if number % 10 == 0:
                page.add(catalogue.GENERATED_TOKENS, 100, model="apar-tiny", replica="r1")
                server.body = page.text()

        server.before = report
        result = apar("monitor", "--metrics", server.url, "--once", "--json", "--interval", "0.1s")

    assert result.exit_code == 0, result.output
    (model,) = json.loads(result.output)["models"]
    assert model["tokens_per_s"] == pytest.approx(100)


@pytest.mark.parametrize("interval_s", [0.5, 2.0, 30.0])
def test_rates_are_right_however_often_pages_are_read(interval_s: float) -> None:
    page = busy_page()
    history = history_for(PagesSource([]), interval_s, 60.0)
    for number in range(40):
        values = parse_page("u", page.text())
        history.add(Snapshot(number * interval_s, values, frozenset({"u"}), {}))
        page.add(catalogue.GENERATED_TOKENS, 100 * interval_s, model="apar-tiny", replica="r1")

    (model,) = history.overview().models
    assert model.tokens_per_s == pytest.approx(100)
    trend = history.overview().trend
    assert len(trend) == 38
    assert trend == pytest.approx((100,) * len(trend))


@pytest.mark.parametrize("option", ["--interval", "--window"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_what_is_no_number_is_refused(option: str, value: str) -> None:
    result = apar("monitor", "--once", option, value)

    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


@pytest.mark.usefixtures("soon_quiet")
def test_once_as_json_is_for_scripts() -> None:
    with served(busy_page().text()) as server:
        result = apar("monitor", "--metrics", server.url, "--once", "--json", "--interval", "0.1s")

    assert result.exit_code == 0, result.output
    content = json.loads(result.output)
    assert content["silence"] is None
    assert content["models"][0]["queued"] == 3
    assert content["replicas"][0]["kv_share"] == pytest.approx(0.6)
    assert content["replicas"][0]["tokens_per_s"] == 0


@pytest.mark.usefixtures("soon_quiet")
def test_once_on_no_terminal_is_plain_text_of_any_length() -> None:
    with served("".join(busy_page(f"r{n}", node=f"w{n}").text() for n in range(60))) as server:
        result = apar("monitor", "--metrics", server.url, "--once", "--interval", "0.1s")

    assert result.exit_code == 0, result.output
    assert "12/2/1" in result.output
    assert "r59" in result.output
    assert "\x1b" not in result.output


def test_a_wrong_address_is_reported_in_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}/metrics"
    result = apar("monitor", "--metrics", url, "--once")

    assert result.exit_code == 1
    assert f"Error: {url} no answer" in result.output
    assert "metrics: {enabled: false}" in result.output


def test_an_outage_during_once_is_an_error() -> None:
    with served(busy_page().text()) as server:

        def fail(number: int) -> None:
            # The first reading succeeds; rates need a second one.
            server.status = 200 if number == 1 else 500

        server.before = fail
        process = subprocess.Popen(
            [*APAR, "monitor", "--metrics", server.url, "--once", "--json", "--interval", "0.1s"],
            stdout=subprocess.PIPE,
        )
        output, _ = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 1
    assert "answered 500" in json.loads(output)["silence"]


def test_pages_and_prometheus_exclude_each_other() -> None:
    result = apar("monitor", "--metrics", "a:1", "--prometheus", "b:2")

    assert result.exit_code == 2


def test_ctrl_c_ends_it_cleanly_and_gives_the_screen_back(tmp_path: Path) -> None:
    with served(busy_page().text()) as server:
        leader, follower = pty.openpty()
        errors = (tmp_path / "errors").open("wb")
        process = subprocess.Popen(
            [*APAR, "monitor", "--metrics", server.url, "--interval", "0.2s"],
            stdin=follower,
            stdout=follower,
            stderr=errors,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "30"},
        )
        os.close(follower)
        seen = b""
        deadline = time.monotonic() + DEADLINE_S
        while b"12/2/1" not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([leader], [], [], 0.1)[0]:
                seen += os.read(leader, 65536)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            assert time.monotonic() < deadline, seen
            seen += _rest(leader)
        # The terminal hands out a few kilobytes at a time.
        while more := _rest(leader):
            seen += more
        os.close(leader)

    assert process.returncode == 0
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
    assert b"Traceback" not in seen
    assert (tmp_path / "errors").read_bytes() == b""


def _rest(leader: int) -> bytes:
    try:
        return os.read(leader, 65536) if select.select([leader], [], [], 0.1)[0] else b""
    except OSError:  # nobody holds the other end any more
        return b""
