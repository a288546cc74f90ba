"""Requests of a load: as long and as forked as they are asked to be, and the same each time."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from apar_core.tree import tree_statistics
from cluster.lab.sizing.errors import SizingError
from cluster.lab.sizing.requests import Workload
from cluster.lab.virtual.text import checkpoint_tokens
from cluster.loadtest.replay_answers import longest_sequence

TOKENS = checkpoint_tokens()


@pytest.mark.parametrize(
    ("forks", "threads", "steps", "attended"),
    # Of the recorded answers: threads; steps per token of the mean answer; attended tokens per
    # square of it, prompts left out.
    [
        ("none", 1.0, 1.003, 0.721),
        ("mixed", 2.66, 0.838, 0.616),
        ("structured", 6.45, 0.505, 0.313),
    ],
)
def test_random_trees_are_like_the_recorded_answers(
    forks: str, threads: float, steps: float, attended: float
) -> None:
    requests = Workload(forks=forks).requests(2000, max_tokens=4096, seed=1)
    trees = [tree_statistics(request.tree, 0) for request in requests]
    answer = fmean(each.text_tokens for each in trees)

    assert answer == pytest.approx(300, rel=0.05)
    assert fmean(len(request.prompt_ids) for request in requests) == pytest.approx(140, rel=0.1)
    assert fmean(each.threads for each in trees) == pytest.approx(threads, rel=0.05)
    assert fmean(each.decode_steps for each in trees) / answer == pytest.approx(steps, rel=0.08)
    assert fmean(each.attended_tokens for each in trees) / answer**2 == pytest.approx(
        attended, rel=0.08
    )


def test_equal_seeds_give_equal_requests_that_fit_into_the_context() -> None:
    workload = Workload(forks="structured", prompt_tokens=100, answer_tokens=200)

    requests = workload.requests(300, max_tokens=512, seed=3)

    def tokens(seed: int) -> list[object]:
        made = workload.requests(300, max_tokens=512, seed=seed)
        return [(each.prompt_ids, each.threads, each.flat) for each in made]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)
    assert max(longest_sequence(request, TOKENS) for request in requests) <= 512
    for request in requests:
        assert request.threads[""][-1] == TOKENS.end_id
        forks = request.threads[""].count(TOKENS.fork_id)
        assert sorted(map(int, filter(None, request.threads))) == list(range(forks))


def test_a_trace_is_repeated_with_other_prompts(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        json.dumps({"id": 1, "prompt": "Why?", "response": "Because of this and that."})
        + "\n"
        + json.dumps({"id": 2, "prompt": "How?", "response": "1. First do it.\n2. Then rest."})
    )

    first, second, again, _ = Workload(trace=file).requests(4, max_tokens=512, seed=0)

    assert first.flat == again.flat
    assert len(first.prompt_ids) == len(again.prompt_ids)
    # A repeated prompt must not be found in the prefix cache, but one system prompt is shared.
    assert first.prompt_ids[0] != again.prompt_ids[0]
    assert first.prompt_ids[:20] == second.prompt_ids[:20]


@pytest.mark.parametrize(
    ("workload", "problem"),
    [
        (
            Workload(answer_tokens=3000),
            "--prompt-tokens 140 and --answer-tokens 3000 exceed the context of 2,048 tokens",
        ),
        (Workload(trace=Path("/no/such/file")), "--trace: /no/such/file"),
    ],
)
def test_impossible_workloads_are_reported(workload: Workload, problem: str) -> None:
    with pytest.raises(SizingError, match=problem):
        workload.requests(10, max_tokens=2048, seed=0)
