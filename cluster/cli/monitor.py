"""`apar monitor`: a running cluster on the terminal."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from cluster.cli.options import AsJson, Duration, Metrics, duration_option
from cluster.cli.terminal import clear_errors
from cluster.monitor.overview import ClusterHistory, Watch
from cluster.monitor.sources import PagesSource, PrometheusSource, Source
from cluster.monitor.view import Screen
from deployments.config.metrics import DEFAULT_PORT

_DEFAULT_PAGE = f"http://127.0.0.1:{DEFAULT_PORT}/metrics"
# A reading may see one report more or less than the next one.
_INTERVALS_PER_RATE = 3
_LEAST_RATE_S = 5.0


def monitor(
    metrics: Metrics = None,
    prometheus: Annotated[
        str | None,
        typer.Option(help="Read from this Prometheus server instead, as http://localhost:9090."),
    ] = None,
    interval: Annotated[
        float, duration_option(help="Time between two readings.", minimum="100ms")
    ] = Duration.of("2s"),
    window: Annotated[
        float,
        duration_option(help="Time that latencies, errors and savings cover.", minimum="1s"),
    ] = Duration.of("60s"),
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Wait until rates are known, print them and exit: a few seconds, or several "
            "scrapes of Prometheus.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a running cluster: replicas, threads, KV cache, tokens per second, queue, latencies.

    Reads http://127.0.0.1:9464/metrics unless --metrics or --prometheus is given. Keeps running
    when the server restarts; Ctrl-C ends it. With --json each reading is one line. Exits with 1 if
    there are no metrics. Example for scripts: [bold]apar monitor --once --json[/bold]
    """
    if metrics and prometheus:
        raise typer.BadParameter("give either --metrics or --prometheus")
    pages = metrics or [_DEFAULT_PAGE]
    source: Source = PrometheusSource(prometheus) if prometheus else PagesSource(pages)
    watch = Watch(source, history_for(source, interval, window))
    title = prometheus or ", ".join(pages)
    try:
        with clear_errors():
            watch.read()
            if not once:
                _follow(watch, title, interval, as_json=as_json)
            while watch.silence is None and not watch.history.reports.settled:
                time.sleep(interval)
                watch.read()
            _print(watch, title, as_json=as_json)
    except KeyboardInterrupt:
        return
    if watch.silence is not None:
        raise typer.Exit(1)


def history_for(source: Source, interval_s: float, window_s: float) -> ClusterHistory:
    """Return the history of a source that is read at this interval."""
    several_s = _INTERVALS_PER_RATE * interval_s
    # A change can be seen no earlier than the next reading.
    quiet_s = max(source.quiet_s, several_s)
    return ClusterHistory(max(several_s, _LEAST_RATE_S), max(window_s, interval_s), quiet_s)


def _follow(watch: Watch, title: str, interval_s: float, *, as_json: bool) -> None:
    """Read and show until Ctrl-C."""
    console = Console()
    if as_json or not console.is_terminal:
        while True:
            time.sleep(interval_s)
            watch.read()
            _print(watch, title, as_json=as_json)
    live = Live(_screen(watch, title), console=console, screen=True, auto_refresh=False)
    try:
        # As a context manager, Live would not restore the screen after Ctrl-C in its first drawing.
        live.start(refresh=True)
        while True:
            time.sleep(interval_s)
            watch.read()
            live.update(_screen(watch, title), refresh=True)
    finally:
        live.stop()


def _screen(watch: Watch, title: str) -> Screen:
    return Screen(watch.overview(), title, time.strftime("%H:%M:%S"), watch.silence)


def _print(watch: Watch, title: str, *, as_json: bool) -> None:
    if as_json:
        content = {"at": time.time(), "silence": watch.silence}
        typer.echo(json.dumps(content | dataclasses.asdict(watch.overview())))
        return
    # Not limited to the height of a screen.
    Console().print(_screen(watch, title), height=None)
