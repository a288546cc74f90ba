"""`apar monitor`: a running cluster on the terminal."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from cluster.cli.numbers import check_finite
from cluster.config.metrics import DEFAULT_PORT
from cluster.monitor.overview import ClusterHistory, MonitorError, Watch
from cluster.monitor.sources import PagesSource, PrometheusSource, Source
from cluster.monitor.view import Screen

DEFAULT_PAGE = f"http://127.0.0.1:{DEFAULT_PORT}/metrics"
# A reading may see one report more or less than the next.
_INTERVALS_PER_RATE = 3
_LEAST_RATE_S = 5.0

MetricsPages = Annotated[
    list[str] | None,
    typer.Option(
        help="Metrics page of a node (address, or HOST:PORT), or a service-discovery list of "
        "pages, as Ray writes it (file or address); may be repeated. "
        f"Default: {DEFAULT_PAGE}."
    ),
]
Prometheus = Annotated[
    str | None,
    typer.Option(help="Read from a Prometheus server instead, such as http://localhost:9090."),
]


def monitor(
    context: typer.Context,
    metrics: MetricsPages = None,
    prometheus: Prometheus = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    window: Annotated[
        float, typer.Option(min=1, help="Seconds that latencies, errors and savings go back.")
    ] = 60.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Read until rates are known, show it, and end. Takes two reports of each process: "
            "10 s where `apar serve` has its own Ray, 20 s elsewhere, 15 s where nothing happens.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one line a reading; for scripts.")
    ] = False,
) -> None:
    """Watch a running cluster: replicas, threads, KV cache, tokens per second, queue, latencies.

    Goes on through restarts of the server. Ctrl-C ends it. Exit code 1 if there is nothing to show.
    Example for scripts: [bold]apar monitor --once --json[/bold]
    """
    check_finite(context)
    if metrics and prometheus:
        raise typer.BadParameter("give either --metrics or --prometheus")
    pages = metrics or [DEFAULT_PAGE]
    source: Source = PrometheusSource(prometheus) if prometheus else PagesSource(pages)
    watch = Watch(source, history_for(source, interval, window))
    title = prometheus or ", ".join(pages)
    try:
        watch.read()
        if once:
            while watch.silence is None and not watch.history.reports.settled:
                time.sleep(interval)
                watch.read()
            _print(watch, title, as_json=as_json)
            if watch.silence is not None:
                raise typer.Exit(1)
        else:
            _follow(watch, title, interval, as_json=as_json)
    except MonitorError as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        pass


def history_for(source: Source, interval_s: float, window_s: float) -> ClusterHistory:
    """The history of a source that is read so often."""
    several_s = _INTERVALS_PER_RATE * interval_s
    # Who looks seldom sees nothing change for as long as he does not look.
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
        # As a context manager it would not give the screen back after Ctrl-C in its first drawing.
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
    # As long as it needs to be: there is no screen to fit.
    console = Console()
    console.print(_screen(watch, title), height=None)
