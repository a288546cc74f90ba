"""Clients that know nothing of each other see the same server: within 5 %.

    export APAR_QUIET=1 APAR_GUIDELLM=FOLDER
    python -m pytest -s tests/integration/loadtest/test_cross_check.py

guidellm takes part where APAR_GUIDELLM names a folder that it was installed into, with
`pip install --target FOLDER guidellm`. The clients run one after the other, so that only a machine
that does nothing else (APAR_QUIET) shows each of them the same server.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from apar_core.evaluation.prompt_sets import held_out_questions
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

QUIET = "APAR_QUIET"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(QUIET not in os.environ, reason=f"without {QUIET} the machine is shared"),
]

ROUNDS = 3
FIGURES = ("tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms")
TOLERANCE = 0.05
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
    with serving(tmp_path, TINY) as server:
        load = Load(server.url, "apar-tiny", prompts(128), NUM_TOKENS, concurrency=8)
        rounds = [one_round(load, tmp_path, number) for number in range(ROUNDS)]

    assert_agreement(rounds, len(load.prompts))


def one_round(load: Load, folder: Path, number: int) -> dict[str, Seen]:
    """Every client once, the order turned from round to round."""
    all_clients = clients()
    names = list(all_clients)
    turned = names[number % len(names) :] + names[: number % len(names)]
    seen = {}
    for name in turned:
        own = folder / f"{name}-{number}"
        own.mkdir()
        seen[name] = all_clients[name](load, own)
    return seen


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
            cells.append(f"{middle:.1f} ({ratios[name, field]:.3f})")
        table.add_row(name, *cells)
    Console().print(table)
    assert {seen.requests for each in rounds for seen in each.values()} == {num_requests}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=TOLERANCE)
