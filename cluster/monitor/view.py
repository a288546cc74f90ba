"""Overview of a cluster on a terminal of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from cluster.monitor.overview import ModelFigures, Overview, Quantiles, ReplicaFigures

NOTHING = "-"
_LEVELS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """Format a number in at most six characters: `0`, `0.4`, `38`, `1,204`, `120k`."""
    if value is None:
        return NOTHING
    if 0 < value < 9.95 and value != round(value):
        return f"{value:.1f}"
    if value < 99_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if value < 99_999_500 else f"{value / 1e6:,.0f}M"


def percent(share: float | None) -> str:
    """Format a share between 0 and 1 as a percentage."""
    if share is None:
        return NOTHING
    shown = 100 * share
    return f"{shown:.1f} %" if 0 < abs(shown) < 9.95 else f"{shown:.0f} %"


def seconds(value: float | None) -> str:
    """Format a latency: `7.0 ms`, `450 ms`, `1.2 s`, `38 s`."""
    if value is None:
        return NOTHING
    if value < 0.9995:
        return f"{1000 * value:.1f} ms" if value < 0.00995 else f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def quantile_pair(quantiles: Quantiles) -> str:
    """Format median and 99th percentile."""
    if quantiles.p50 is None:
        return NOTHING
    return f"{seconds(quantiles.p50)} / {seconds(quantiles.p99)}"


def age(value_s: float, *, older: bool) -> str:
    """Format the age of a replica: `12s`, `5m`, `3h`; `>2d` if it may be older."""
    mark = ">" if older else ""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if value_s >= unit_s:
            return f"{mark}{value_s / unit_s:.0f}{unit}"
    return f"{mark}{value_s:.0f}s"


def bar(share: float, width: int) -> str:
    """Draw a bar with a resolution of an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width, "░")


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last values as columns, scaled from 0 to their maximum."""
    shown = values[-width:] if width > 0 else ()
    highest = max(shown, default=0.0)
    if highest <= 0:
        return _LEVELS[0] * len(shown)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(max(value, 0.0) / highest * top)] for value in shown)


_NARROW = 100
_MIN_REPLICA_ROWS = 3
_KV_WARNING, _KV_ALARM = 0.75, 0.9


@dataclass(frozen=True, slots=True)
class Screen:
    """The monitor's screen, which renders to any size.

    `silence` describes an outage; the overview is then that of the last successful reading.
    """

    overview: Overview
    title: str
    clock: str
    silence: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        narrow = width < _NARROW
        above: list[RenderableType] = self._head(width)
        above.append(_models(self.overview.models, narrow=narrow))
        below: list[RenderableType] = [
            _latencies(self.overview, narrow=narrow),
            _forks(self.overview, narrow=narrow),
            _rejected(self.overview),
        ]
        height = options.height if options.height is not None else 10_000
        taken = len(console.render_lines(Group(*above, *below), options.update(height=None)))
        # Lines for the table's title and header, and for the number of hidden rows.
        rows = max(height - taken - 4, _MIN_REPLICA_ROWS)
        yield Group(*above, _replicas(self.overview.replicas, rows, narrow=narrow), *below)

    def _head(self, width: int) -> list[RenderableType]:
        overview = self.overview
        lines: list[RenderableType] = [
            Rule(Text.assemble(("apar monitor", "bold"), f"  {self.title}  {self.clock}"))
        ]
        if self.silence is not None:
            lines.append(Text(self.silence, style="bold white on red"))
        lines += [
            Text(f"{page} {reason}", style="red") for page, reason in overview.failures.items()
        ]
        now = overview.trend[-1] if overview.trend else None
        label = f"tokens/s {number(now):>6} "
        highest = f" max {number(max(overview.trend, default=None))}"
        room = width - len(label) - len(highest)
        lines.append(
            Text.assemble(label, (sparkline(overview.trend, room), "green"), (highest, "dim"))
        )
        return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold cyan", box=None, pad_edge=False
    )
    for place, column in enumerate(columns):
        is_name = place == 0 or column == "replica"
        table.add_column(
            column,
            justify="left" if is_name or column == "KV cache" else "right",
            overflow="ellipsis",
            no_wrap=True,
        )
    return table


def _models(models: Sequence[ModelFigures], *, narrow: bool) -> Table:
    queued = sum(model.queued for model in models)
    running = sum(model.running for model in models)
    title = f"Models: {number(running)} requests running, {number(queued)} queued"
    table = _table(
        title, "model", "replicas", "running", "queued", "tokens/s",
        "req/s" if narrow else "requests/s", "errors",
    )  # fmt: skip
    for model in models:
        errors = Text(percent(model.error_share), style="bold red" if model.error_share else "")
        queue = Text(number(model.queued), style="yellow" if model.queued else "")
        table.add_row(
            Text(model.model), number(model.replicas), number(model.running), queue,
            number(model.tokens_per_s), number(model.requests_per_s), errors,
        )  # fmt: skip
    return table


def _replicas(replicas: Sequence[ReplicaFigures], most_rows: int, *, narrow: bool) -> Table:
    table = _table(
        "Replicas (threads: running/waiting/deferred)", "model", "replica",
        "reqs" if narrow else "requests", "threads", "KV cache", "tokens/s", "forks/s", "age",
    )  # fmt: skip
    shown = list(replicas)
    if len(shown) > most_rows:
        # Show the fullest replicas.
        shown.sort(key=lambda each: -(each.kv_share or 0.0))
        shown = shown[: most_rows - 1]
    for each in shown:
        table.add_row(
            Text(each.model),
            Text(each.replica),
            number(each.requests),
            f"{number(each.running)}/{number(each.waiting)}/{number(each.deferred)}",
            _kv_bar(each.kv_share, 6 if narrow else 20),
            number(each.tokens_per_s),
            number(each.forks_per_s),
            age(each.age_s, older=each.older),
        )
    left_out = len(replicas) - len(shown)
    if left_out:
        table.add_row(Text(f"and {left_out} more", style="dim"))
    if not replicas:
        table.add_row(Text("no replica reports metrics", style="yellow"))
    return table


def _kv_bar(share: float | None, width: int) -> Text:
    if share is None:
        return Text("-")
    style = "red" if share >= _KV_ALARM else "yellow" if share >= _KV_WARNING else "green"
    return Text.assemble((bar(share, width), style), f" {percent(share):>5}")


def _latencies(overview: Overview, *, narrow: bool) -> Table:
    title = f"Latency, p50 / p99 of the last {overview.window_s:.0f} s"
    table = _table(title, "model", "first token", "per token", "full answer", "queue")
    for model in overview.models:
        pairs = (model.first_token_s, model.token_s, model.latency_s, model.queue_s)
        table.add_row(Text(model.model), *(_pair(pair, narrow=narrow) for pair in pairs))
    return table


def _pair(quantiles: Quantiles, *, narrow: bool) -> str:
    text = quantile_pair(quantiles)
    return text.replace(" ms", "ms").replace(" s", "s") if narrow else text


def _forks(overview: Overview, *, narrow: bool) -> Table:
    title = f"Forks per second, and what they saved in the last {overview.window_s:.0f} s"
    table = _table(
        title, "model", "accepted", "delayed", "refused",
        "attended" if narrow else "attended tokens", "cached" if narrow else "cached at the peak",
    )  # fmt: skip
    for model in overview.models:
        forks = model.forks_per_s or {}
        table.add_row(
            Text(model.model),
            *(number(forks.get(each)) for each in ("accepted", "delayed", "refused")),
            _saving(model.attention_saved),
            _saving(model.cache_saved),
        )
    return table


def _saving(share: float | None) -> str:
    return percent(None if share is None else -share)


def _rejected(overview: Overview) -> Text:
    reasons = ", ".join(f"{reason} {number(count)}" for reason, count in overview.rejected.items())
    style = "yellow" if overview.rejected else "dim"
    span = seconds(overview.window_s)
    return Text.assemble((f"Rejected in the last {span}: {reasons or 'none'}", style))
