"""Builders of request records and runs."""

from typing import Any

from cluster.loadtest.jobs import Target, WorkloadSettings
from cluster.loadtest.run_file import (
    ClientFigures,
    LoadSettings,
    RepeatFacts,
    RequestRecord,
    Run,
    RunFacts,
)

KEPT_UP = ClientFigures(
    cpu_share=0.1,
    busiest_cpu_share=0.2,
    lag_p50_s=0.0,
    lag_p99_s=0.001,
    lag_max_s=0.002,
    late_p99_s=None,
)


def record(sent_s: float = 0.0, **fields: Any) -> RequestRecord:
    """A complete answer of 5 tokens: the first after 1 s, then one every 0.5 s."""
    pieces = fields.pop("pieces", [(1.0 + 0.5 * number, 4) for number in range(5)])
    given = {
        "repeat": 0,
        "index": 0,
        "id": "a",
        "category": "other",
        "pieces": pieces,
        "end_s": pieces[-1][0] if pieces else 1.0,
        "text_tokens": len(pieces),
        "paragraph_s": 2.0,
        "finish_reason": "stop",
        "status": 200,
    }
    return RequestRecord(sent_s=sent_s, **(given | fields))


def run_of(
    *repeats: list[RequestRecord],
    name: str = "run",
    duration_s: float = 10.0,
    client: ClientFigures = KEPT_UP,
    **settings: Any,
) -> Run:
    """A run with these requests in its repeats."""
    facts = RunFacts(
        settings=LoadSettings(
            target=Target(url="http://127.0.0.1:1"),
            model="m",
            workload=WorkloadSettings(spec="prompts:held-out"),
            arrivals="all",
            **settings,
        ),
        started="2026-01-01T00:00:00",
        repeats=[
            RepeatFacts(
                repeat=number,
                planned=len(records),
                duration_s=duration_s,
                interrupted=False,
                client=client,
            )
            for number, records in enumerate(repeats)
        ],
    )
    records = [
        each.model_copy(update={"repeat": number})
        for number, records in enumerate(repeats)
        for each in records
    ]
    return Run(name, facts, records)
