"""Figures as short texts for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.monitor.overview import Quantiles

NOTHING = "-"
_LEVELS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """At most five characters up to 99,999: `0`, `0.4`, `3`, `38`, `1,204`, `120k`."""
    if value is None:
        return NOTHING
    if 0 < value < 9.95 and value != round(value):
        return f"{value:.1f}"
    if value < 99_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if value < 99_999_500 else f"{value / 1e6:,.0f}M"


def percent(share: float | None) -> str:
    """A share of 0 to 1."""
    if share is None:
        return NOTHING
    shown = 100 * share
    return f"{shown:.1f} %" if 0 < abs(shown) < 9.95 else f"{shown:.0f} %"


def seconds(value: float | None) -> str:
    """A latency: `7 ms`, `450 ms`, `1.2 s`, `38 s`."""
    if value is None:
        return NOTHING
    if value < 0.9995:
        return f"{1000 * value:.1f} ms" if value < 0.00995 else f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def quantile_pair(quantiles: Quantiles) -> str:
    """Median and 99th percentile."""
    if quantiles.p50 is None:
        return NOTHING
    return f"{seconds(quantiles.p50)} / {seconds(quantiles.p99)}"


def age(value_s: float, *, older: bool) -> str:
    """How long a replica has been seen: `12s`, `5m`, `3h`, `>2d` where it is older than that."""
    mark = ">" if older else ""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if value_s >= unit_s:
            return f"{mark}{value_s / unit_s:.0f}{unit}"
    return f"{mark}{value_s:.0f}s"


def bar(share: float, width: int) -> str:
    """A bar of blocks, to an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width, "░")


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as columns between 0 and the highest of them."""
    shown = values[-width:] if width > 0 else ()
    highest = max(shown, default=0.0)
    if highest <= 0:
        return _LEVELS[0] * len(shown)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(max(value, 0.0) / highest * top)] for value in shown)
