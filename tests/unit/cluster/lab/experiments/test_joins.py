"""Answers that join: the programs played without an engine, and the command in virtual time."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apar_core.offline.data.joined import JoinedBlock, JoinedTokens
from cluster.cli.main import app
from cluster.lab.experiments.joins import (
    JoinedQuestion,
    OneSequence,
    ResubmittingClient,
    join_table,
    marked_encoder,
)
from tests.unit.cluster.lab.experiments.played_programs import Played

PROMPT = [100, 101]
END = 2
# Two blocks: 10 | 20 21, 30 | 11 | 40, 50 | 12, with seeds 1 to 4.
TOKENS = JoinedTokens(
    ([10], [11], [12, END]),
    (
        JoinedBlock(([7, 1], [7, 2]), ([20, 21], [30]), [2, 30, 8]),
        JoinedBlock(([7, 3], [7, 4]), ([40], [50]), [4, 50, 8]),
    ),
)
QUESTION = JoinedQuestion("a", "generic", PROMPT, TOKENS, TOKENS, [60, 61, END])


def test_a_client_sends_a_request_for_every_thread_and_continuation() -> None:
    played = Played(ResubmittingClient(QUESTION, 0.0))

    assert {name: played.prompt(name) for name in played.submitted} == {
        "parent.0": PROMPT,
        "0.0": [*PROMPT, 10, 7, 1],
        "0.1": [*PROMPT, 10, 7, 2],
        "parent.1": [*PROMPT, 10, 7, 1, 20, 21, 2, 30, 8],
        "1.0": [*PROMPT, 10, 7, 1, 20, 21, 2, 30, 8, 11, 7, 3],
        "1.1": [*PROMPT, 10, 7, 1, 20, 21, 2, 30, 8, 11, 7, 4],
        "parent.2": [*PROMPT, 10, 7, 1, 20, 21, 2, 30, 8, 11, 7, 3, 40, 4, 50, 8],
    }
    assert played.begun_in == {
        "parent.0": 0, "0.0": 1, "0.1": 1, "parent.1": 3, "1.0": 4, "1.1": 4, "parent.2": 5,
    }  # fmt: skip


def test_every_request_but_the_first_waits_for_a_round_trip() -> None:
    played = Played(ResubmittingClient(QUESTION, 0.25))

    delays = {name: each.delay_s for name, each in played.submitted.items()}
    assert delays.pop("parent.0") == 0.0
    assert set(delays.values()) == {0.25}


@pytest.mark.parametrize(
    "program", [ResubmittingClient(QUESTION, 0.0), OneSequence(QUESTION, TOKENS.flat)]
)
def test_the_text_is_the_joined_one(program: ResubmittingClient | OneSequence) -> None:
    Played(program, most_tokens=3, seed=4)

    assert program.text_ids() == program.answer.flat
    assert program.answer.flat == [10, 7, 1, 20, 21, 2, 30, 8, 11, 7, 3, 40, 4, 50, 8, 12, END]
    assert program.answer.text_tokens == 2


def test_the_critical_path_has_the_longest_thread_of_each_block() -> None:
    assert QUESTION.critical_tokens == (1 + 1 + 2) + 2 + 1


def test_structure_is_encoded_apart_from_text() -> None:
    encode = marked_encoder(
        lambda text: [len(text)], lambda text: [100 + len(text)], {"<Outline>": 5}
    )

    assert encode("ab\n<Outline>12: c\n") == [102, 1, 5, 3, 102, 1]


def test_ratios_are_over_the_same_text_in_sequence() -> None:
    def run(method: str, duration_s: float, computed: int) -> dict[str, Any]:
        return {
            "method": method, "concurrency": 8, "round_trip_s": 0.01, "answers": 4,
            "text_tokens": 100, "duration_s": duration_s, "latency_s": duration_s / 4,
            "latency_p90_s": 1.0, "computed_tokens": computed, "requests": 4, "steps": 10,
            "rows": 20, "preemptions": 0,
        }  # fmt: skip

    table = join_table([run("sequential", 20.0, 200), run("client", 10.0, 260)])

    rows = [dict(zip((c.title for c in table.columns), row, strict=True)) for row in table.rows]
    assert rows[1]["throughput x"] == rows[1]["latency x"] == 2.0
    assert rows[1]["recomputed tokens per answer"] == 15.0
    assert rows[1]["method"] == "resubmitting client, 10 ms round trip"


@pytest.mark.slow
def test_the_command_compares_methods_on_the_corpus_and_resumes(tmp_path: Path) -> None:
    options = [
        "--answers",
        "8",
        "--concurrency",
        "2",
        "--round-trips",
        "0,50",
        "--out",
        str(tmp_path),
    ]

    first = CliRunner().invoke(app, ["experiment", "joins", *options])
    done = (tmp_path / "parts.jsonl").read_bytes()
    again = CliRunner().invoke(app, ["experiment", "joins", *options])

    assert first.exit_code == again.exit_code == 0, first.output
    assert (tmp_path / "parts.jsonl").read_bytes() == done
    with (tmp_path / "tables" / "joins.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    latency = {method: float(row["mean latency (s)"]) for method, row in rows.items()}
    fast, slow = (latency[f"resubmitting client, {ms} ms round trip"] for ms in (0, 50))
    assert fast < latency["sequential, recorded answer"] < latency["sequential, same text"]
    # At least one block, so two more round trips.
    assert slow > fast + 0.1
