"""The view fits the terminal and shows what an operator needs."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.live import Live

from cluster.monitor.overview import (
    ModelFigures,
    Overview,
    Quantiles,
    ReplicaFigures,
)
from cluster.monitor.view import Screen, age, bar, number, percent, seconds, sparkline

REPLICA = ReplicaFigures("apar-tiny", "k3x9q2", 4, 12, 2, 1, 0.61, 412.0, 3.2, 75.0, older=True)
LATENCY = Quantiles(0.42, 1.83)
MODEL = ModelFigures(
    model="apar-tiny", replicas=2, running=8, queued=5, tokens_per_s=812.0, requests_per_s=5.2,
    error_share=0.021, forks_per_s={"accepted": 6.4, "delayed": 0.5, "refused": 0.0},
    attention_saved=0.47, cache_saved=0.34, first_token_s=LATENCY, token_s=Quantiles(0.007, 0.02),
    latency_s=LATENCY, queue_s=Quantiles(None, None),
)  # fmt: skip
OVERVIEW = Overview(6.0, 60.0, (MODEL,), (REPLICA,), {"key_limit": 3.0}, (100.0, 400.0, 812.0), {})


def shown(overview: Overview, width: int, height: int = 50, silence: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(Screen(overview, "http://node/metrics", "12:00:00", silence), height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_everything_is_shown_at_usual_widths(width: int) -> None:
    text = shown(OVERVIEW, width)

    for words in (
        "apar-tiny", "k3x9q2", "12/2/1", "61 %", "412", "3.2", ">1m", "812", "5 queued", "2.1 %",
        "-47 %", "-34 %", "6.4", "key_limit 3", "1.8", "7.0", "▄█",
    ):  # fmt: skip
        assert words in text, words
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("width", [20, 40, 60])
def test_narrow_terminals_are_respected(width: int) -> None:
    assert all(len(line) <= width for line in shown(OVERVIEW, width).splitlines())


def test_of_many_replicas_the_fullest_are_shown() -> None:
    replicas = tuple(
        replace(REPLICA, replica=f"r{number}", kv_share=number / 100) for number in range(100)
    )
    text = shown(replace(OVERVIEW, replicas=replicas), 100, height=30)

    assert len(text.splitlines()) <= 30
    assert "r99" in text
    assert "r5 " not in text
    left_out = 100 - sum(f"r{number} " in text for number in range(100))
    assert f"and {left_out} more" in text
    assert "Rejected" in text


def test_an_outage_is_shown_above_the_last_figures() -> None:
    text = shown(OVERVIEW, 100, silence="no answer since 11:59:50 (10 s): refused")

    assert text.index("no answer since 11:59:50") < text.index("k3x9q2")


def test_a_failed_page_and_an_empty_cluster_are_shown() -> None:
    empty = replace(OVERVIEW, replicas=(), failures={"http://other/metrics": "no answer in time"})

    text = shown(empty, 100)

    assert "http://other/metrics no answer in time" in text
    assert "no replica reports metrics" in text


def test_names_are_no_markup() -> None:
    model = replace(MODEL, model="[red]odd[/red]")

    assert "[red]odd[/red]" in shown(replace(OVERVIEW, models=(model,)), 140)


def test_the_live_screen_draws_it() -> None:
    console = Console(file=io.StringIO(), width=90, height=24, force_terminal=True)
    screen = Screen(OVERVIEW, "node", "12:00:00")
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        live.update(screen, refresh=True)

    assert isinstance(console.file, io.StringIO)
    assert "k3x9q2" in console.file.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(None), "-"), (number(0), "0"), (number(0.44), "0.4"), (number(38), "38"),
        (number(1204.4), "1,204"), (number(120_400), "120k"), (number(2.5e8), "250M"),
        (percent(None), "-"), (percent(0.021), "2.1 %"), (percent(-0.47), "-47 %"),
        (percent(1), "100 %"),
        (seconds(None), "-"), (seconds(0.0071), "7.1 ms"), (seconds(0.45), "450 ms"),
        (seconds(1.23), "1.2 s"), (seconds(38), "38 s"),
        (age(12, older=False), "12s"), (age(300, older=False), "5m"),
        (age(90_000, older=True), ">1d"),
        (bar(0.5, 4), "██░░"), (bar(0.3125, 2), "▋░"), (bar(7.0, 3), "███"), (bar(-1, 2), "░░"),
        (sparkline((0, 1, 2, 4), 3), "▃▅█"), (sparkline((0, 0), 9), "▁▁"), (sparkline((), 9), ""),
        (sparkline((5,), 0), ""),
    ],
)  # fmt: skip
def test_figures_are_short(text: str, expected: str) -> None:
    assert text == expected
