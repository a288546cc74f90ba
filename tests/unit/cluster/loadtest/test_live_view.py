"""Live figures of a running load test."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass

from rich.console import Console

from apar_core.offline.data.records import ChatMessage
from cluster.loadtest.client import Attempt, LoadClient
from cluster.loadtest.jobs import Job, Target
from cluster.loadtest.live_view import LiveFigures, LiveView
from cluster.loadtest.run_file import Answered
from tests.unit.cluster.loadtest.load_records import record

JOB = Job("1", "other", (ChatMessage("user", "?"),), b"{}")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def client() -> LoadClient:
    return LoadClient(Target(url="127.0.0.1:1"), timeout_s=1)


def test_speed_is_estimated_from_characters() -> None:
    clock, asking = Clock(), client()
    figures = LiveFigures(asking, clock)
    assert "0 running  0 tokens/s  ttft -" in figures.text()

    # 30 characters of 10 tokens have ended; 12 more of an answer that runs are 4 tokens.
    figures.take(Answered(record(text_tokens=10), (), "x" * 30))
    attempt = Attempt(JOB, time.perf_counter())
    attempt.stream.characters = 12
    asking.under_way.add(attempt)
    clock.now_s = 2.0

    assert figures.text() == "1 running  7 tokens/s  ttft 1.00 s"


def test_speed_covers_only_the_last_seconds() -> None:
    clock = Clock()
    figures = LiveFigures(client(), clock)
    figures.take(Answered(record(text_tokens=10), (), "x" * 30))
    figures.text()
    for clock.now_s in (2.0, 4.0, 6.0, 8.0, 10.0):
        last = figures.text()

    assert "0 tokens/s" in last


def test_errors_are_shown_by_kind() -> None:
    figures = LiveFigures(client())
    for kind in ("cut", "http_503", "http_503"):
        figures.take(Answered(record(error=kind, pieces=[]), (), ""))

    assert figures.text().endswith("errors: http_503 2, cut 1")
    assert figures.ended == 3


async def test_without_a_terminal_a_stage_ends_with_a_line() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=200)).stage("repeat 1 of 1", 2, client()) as show:
        show(Answered(record(), (), "x" * 20))

    assert out.getvalue().startswith("repeat 1 of 1: 1 of 2  0 running")


async def test_on_a_terminal_a_stage_shows_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    with LiveView(console).stage("repeat 1 of 1", 2, client()) as show:
        show(Answered(record(), (), "x" * 20))

    assert "1/2" in out.getvalue()
    assert "ttft 1.00 s" in out.getvalue()
