"""Cost of forks, counted in an engine without a model, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.lab.experiments import fork_cost
from cluster.lab.experiments.fork_cost import CACHED, SHARED, report_fork_cost
from cluster.lab.experiments.settings import ExperimentSettings

NUM_ANSWERS, NUM_TIPS = 3, 4
TIPS = "\n".join(
    f"{i}. Tip {i}: do this and that, and then do it again." for i in range(1, NUM_TIPS + 1)
)


@pytest.mark.engine
def test_a_fork_computes_one_token_of_its_prefix_and_prefix_caching_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "answers.jsonl"
    lines = [
        {"id": n, "prompt": f"Give me {n} tips.", "response": f"Here are {n} tips:\n\n{TIPS}"}
        for n in range(NUM_ANSWERS)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    settings = ExperimentSettings(
        trace=trace, answers=NUM_ANSWERS, max_tokens=512, kv_tokens=16 * 512
    )

    report = report_fork_cost(settings, tmp_path / "out", lambda *_: lambda: None)

    shared, cached = report.data["ways"][SHARED], report.data["ways"][CACHED]
    forks = NUM_ANSWERS * NUM_TIPS
    assert (shared["forks"], shared["fallbacks"]) == (forks, 0)
    # Of what the parent has read and written, a child only computes the fork token.
    assert shared["computed_tokens"] == forks == cached["forks"]
    assert cached["computed_tokens"] > 2 * forks
    [table] = report.tables
    assert table.title == f"Cost of a fork: {forks} forks, blocks of 16 tokens"
    assert [row[:2] for row in table.rows] == [
        (SHARED, 1.0), (CACHED, cached["computed_tokens"] / forks),
    ]  # fmt: skip

    # A folder that has the counts needs no engine.
    monkeypatch.setattr(fork_cost, "_measure", None)
    again = report_fork_cost(settings, tmp_path / "out", lambda *_: lambda: None)
    assert again.data == report.data
