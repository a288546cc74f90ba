"""Durations as people write them: a number and a unit, such as `2s` or `50ms`."""

import re

_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(us|ms|s|m|h)")
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Return a duration in seconds. Raises ValueError, which shows the right form."""
    matched = _DURATION.fullmatch(text.strip())
    if matched is None:
        raise ValueError(f"{text!r} is not a duration: write a number and a unit, such as 2s, "
                         "50ms, 5m or 1h")  # fmt: skip
    return float(matched[1]) * _UNITS_S[matched[2]]


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it is at least one, such as `30m`."""
    for unit in ("h", "m", "s", "ms"):
        if seconds >= _UNITS_S[unit]:
            return f"{seconds / _UNITS_S[unit]:g}{unit}"
    return f"{seconds / _UNITS_S['us']:g}us" if seconds else "0s"
