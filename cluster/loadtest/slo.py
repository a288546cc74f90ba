"""Service-level objectives of a request: `ttft=2s,tpot=50ms,e2e=30s`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apar_core.errors import EvaluationError
from cluster.durations import parse_duration
from cluster.loadtest.records import RequestRecord
from cluster.loadtest.times import FIRST, REQUEST_TIMES

Objectives = Mapping[str, float]
"""The longest time allowed, in seconds, by the name of the time."""


def parse_slo(text: str) -> Objectives:
    """Return the objectives that a text names.

    Raises EvaluationError for an unknown name, a value without unit, or a name given twice.
    """
    objectives: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        if name not in REQUEST_TIMES:
            known = ", ".join(REQUEST_TIMES)
            raise EvaluationError(f"--slo {part!r}: no time is called {name!r}; known: {known}")
        if name in objectives:
            raise EvaluationError(f"--slo {text!r}: {name} is given twice")
        try:
            objectives[name] = parse_duration(value)
        except ValueError as error:
            raise EvaluationError(f"--slo {part!r}: {error}") from error
        if not objectives[name]:
            raise EvaluationError(f"--slo {part!r}: the time must be above 0")
    if not objectives:
        raise EvaluationError(f"--slo {text!r} names no objective, as ttft=2s does")
    return objectives


def meets(record: RequestRecord, objectives: Objectives) -> bool:
    """Whether a request ended well and within all of its objectives.

    A time that an answer does not have (of one token there is no time per further token) is met,
    but for that to the first token, without which there was no text at all.
    """
    if record.error is not None:
        return False
    times = {name: REQUEST_TIMES[name].of(record) for name in objectives}
    return all(
        name != FIRST if value is None else value <= objectives[name]
        for name, value in times.items()
    )


def unmeasured(records: Sequence[RequestRecord], objectives: Objectives) -> list[str]:
    """Return the objectives whose time no whole answer has, though there are whole answers.

    Nothing then says whether they were met: a time on the critical path, say, is only known where
    the server tells the steps.
    """
    whole = [record for record in records if record.error is None]
    return [
        name
        for name in objectives
        if name != FIRST
        and whole
        and all(REQUEST_TIMES[name].of(record) is None for record in whole)
    ]
