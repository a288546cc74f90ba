"""Clients that know nothing of each other see the same server: within 5 %.

    export APAR_QUIET=1 APAR_GUIDELLM=FOLDER
    python -m pytest -s tests/integration/loadtest/test_cross_check.py

guidellm takes part where APAR_GUIDELLM names a folder that it was installed into, with
`pip install --target FOLDER guidellm`. The clients run one after the other on a machine that does
nothing else (APAR_QUIET). It may still be faster at one time than at another: of the running
application, each client's figures are compared with what the server itself measured meanwhile. So
a client that slows the server down by the cores that it takes is not seen by this.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from apar_core.offline.evaluation.prompt_sets import held_out_questions
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Metric
from tests.fakes.chat_server import Reply, chat_server
from tests.integration.loadtest.peer_clients import (
    GUIDELLM,
    Client,
    Load,
    Seen,
    by_apar,
    by_guidellm,
    by_vllm,
)
from tests.integration.serving.apar_process import TINY, serving
from tests.integration.serving.metrics_reading import Page, metrics_url, read_at_rest

QUIET = "APAR_QUIET"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(QUIET not in os.environ, reason=f"without {QUIET} the machine is shared"),
]

ROUNDS = 3
FIGURES = ("tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms")
TOLERANCE = 0.05
SUMS = ("_sum", "_count")
NUM_TOKENS = 64


def clients() -> dict[str, Client]:
    found: dict[str, Client] = {"apar": by_apar, "vllm": by_vllm}
    return found | ({"guidellm": by_guidellm} if GUIDELLM in os.environ else {})


def prompts(number: int) -> tuple[str, ...]:
    questions = [question for question in held_out_questions() if not question.raw_prompt]
    return tuple(question.turns[0].replace("\n", " ") for question in questions[:number])


def test_clients_agree_on_a_server_that_keeps_a_pace(tmp_path: Path) -> None:
    reply = Reply((" word",) * NUM_TOKENS, first_s=0.25, gap_s=0.03)
    with chat_server(lambda body, number: reply, models=({"id": "apar-tiny"},)) as server:
        load = Load(server.url, "apar-tiny", prompts(48), NUM_TOKENS, concurrency=8)
        seen = one_round(load, tmp_path, 0)

    assert_agreement([seen], len(load.prompts))


def test_clients_agree_on_the_running_application(tmp_path: Path) -> None:
    with serving(tmp_path, TINY, metrics={"port": 0}) as server:
        load = Load(server.url, "apar-tiny", prompts(128), NUM_TOKENS, concurrency=8)
        page_url = metrics_url(server)
        rounds = [one_round(load, tmp_path, number, page_url) for number in range(ROUNDS)]

    assert_agreement(rounds, len(load.prompts))


def one_round(
    load: Load, folder: Path, number: int, page_url: str | None = None
) -> dict[str, Seen]:
    """Every client once, the order turned from round to round.

    With a page of metrics the figures are shares of what the server measured in the same time.
    """
    all_clients = clients()
    names = list(all_clients)
    turned = names[number % len(names) :] + names[: number % len(names)]
    seen = {}
    for name in turned:
        own = folder / f"{name}-{number}"
        own.mkdir()
        before = None if page_url is None else read_at_rest(page_url)
        seen[name] = all_clients[name](load, own)
        if page_url is not None and before is not None:
            seen[name] = beside_server(seen[name], before, read_at_rest(page_url), load)
    return seen


def beside_server(seen: Seen, before: Page, after: Page, load: Load) -> Seen:
    """Times over the server's mean times; throughput over that of so many clients with these times.

    The first chunk of a stream is not counted in its time per token.
    """

    def mean_s(metric: Metric) -> float:
        seconds, number = (after.total(metric, part) - before.total(metric, part) for part in SUMS)
        # A client may warm up.
        assert len(load.prompts) <= number <= len(load.prompts) + load.concurrency
        return seconds / number

    e2e_s = mean_s(catalogue.REQUEST_LATENCY)
    ttft_s = mean_s(catalogue.TIME_TO_FIRST_TOKEN)
    tpot_s = (e2e_s - ttft_s) / (load.num_tokens - 1)
    return Seen(
        requests=seen.requests,
        tokens_per_s=seen.tokens_per_s * e2e_s / (load.concurrency * load.num_tokens),
        ttft_ms=seen.ttft_ms / (1000 * ttft_s),
        tpot_ms=seen.tpot_ms / (1000 * tpot_s),
        e2e_ms=seen.e2e_ms / (1000 * e2e_s),
    )


def assert_agreement(rounds: list[dict[str, Seen]], num_requests: int) -> None:
    """The median over the rounds of what a client sees by what ours sees is close to 1."""
    table = Table(title=f"Of {len(rounds)} rounds")
    for title in ("Client", *FIGURES):
        table.add_column(title)
    ratios: dict[tuple[str, str], float] = {}
    for name in rounds[0]:
        cells = []
        for field in FIGURES:
            ratios[name, field] = statistics.median(
                getattr(each[name], field) / getattr(each["apar"], field) for each in rounds
            )
            middle = statistics.median(getattr(each[name], field) for each in rounds)
            cells.append(f"{middle:.4g} ({ratios[name, field]:.3f})")
        table.add_row(name, *cells)
    Console().print(table)
    assert {seen.requests for each in rounds for seen in each.values()} == {num_requests}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=TOLERANCE)
