"""What requests cost, counted by hand on a small tree and on recorded answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apar_core.offline.data.records import ParagraphRecord
from cluster.sizing.errors import SizingError
from cluster.sizing.fork_profiles import PROFILES, find_profile
from cluster.sizing.request_shape import shape_of
from cluster.sizing.traces import TEMPLATE_TOKENS, num_tokens, read_trace, tree_of

TRACES = Path(__file__).resolve().parents[5] / "shared" / "data" / "traces"
recorded = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recorded answers in {TRACES}")

FORKED = ParagraphRecord("a" * 8, ParagraphRecord("b" * 12), ParagraphRecord("c" * 4))
"""Paragraphs of 2, 3 and 1 tokens; the second is the detail of the first."""


def test_a_forked_answer_is_counted_in_the_papers_schedule() -> None:
    shape = shape_of([(10, tree_of(FORKED))], "test")

    # The root generates 2 tokens, the fork, 1 token and its end: steps 1 to 5. The child, from step
    # 4 on, 3 tokens and its end: 4 to 7.
    assert (shape.threads, shape.generated_tokens, shape.steps) == (2, 9, 7)
    assert shape.alive_threads == pytest.approx(9 / 7)
    # Held before each step, beside the prompt: 0, 1, 2, then 3 and [Child]: 4, 6, then the root's 3
    # of which the child reads, [Child], and its own 2 and 3.
    assert shape.held_tokens == pytest.approx(10 + (0 + 1 + 2 + 4 + 6 + 6 + 7) / 7)
    assert shape.peak_tokens == 10 + 7
    assert (shape.sequential_steps, shape.sequential_peak_tokens) == (7, 16)


def test_one_thread_holds_half_of_its_answer_on_average() -> None:
    shape = shape_of([(100, tree_of(ParagraphRecord("x" * 420)))], "test")

    assert shape.text_tokens == 100
    assert shape.held_tokens == pytest.approx(150)
    assert shape.held_tokens_sd == pytest.approx(101 / 12**0.5, rel=0.01)
    assert (shape.alive_threads, shape.alive_threads_sd) == (1, 0)
    assert shape.attended_tokens == shape.sequential_attended_tokens == 101 * 100 + 101 * 50


def test_a_long_answer_weighs_by_its_steps_and_is_remembered() -> None:
    short, long = tree_of(ParagraphRecord("x" * 42)), tree_of(ParagraphRecord("x" * 4200))
    shape = shape_of([(0, short)] * 9 + [(0, long)], "test")

    assert shape.long_steps == 1001
    assert shape.held_tokens == pytest.approx((9 * 11 * 5 + 1001 * 500) / (99 + 1001))


def test_nothing_recorded_is_an_error() -> None:
    with pytest.raises(SizingError, match="holds no answer"):
        shape_of([], "trace.jsonl")


def test_a_trace_gives_prompts_with_their_history(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    history = [{"role": "user", "content": "h" * 42}, {"role": "assistant", "content": "i" * 42}]
    lines = [
        {"prompt": "p" * 42, "response": "Plain.", "history": history},
        {"prompt": "p" * 42, "response": "Plain."},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")

    prompts = [prompt for prompt, _ in read_trace(file)]

    assert prompts == [TEMPLATE_TOKENS + 30, TEMPLATE_TOKENS + 10]
    assert num_tokens("") == 0


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": "p"}', '{"prompt": "p", "response": 3}', '{"prompt": 1}']
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt": "p", "response": "r"}\n' + line + "\n")

    with pytest.raises(SizingError, match="line 2"):
        list(read_trace(file))
    with pytest.raises(SizingError, match="cannot be read"):
        list(read_trace(tmp_path / "missing.jsonl"))


def test_without_forking_every_answer_is_one_thread(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    answer = "Tips:\n\n" + "\n".join(
        f"{n}. Tip {n}: This is a long and useful detail about it. And more." for n in (1, 2, 3)
    )
    file.write_text(json.dumps({"prompt": "p", "response": answer}))

    forked, plain = shape_of(read_trace(file), "f"), shape_of(read_trace(file, forking=False), "p")

    assert forked.threads > plain.threads == 1
    assert forked.steps < plain.steps


@recorded
@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_the_recorded_answers(name: str) -> None:
    file = TRACES / ("structured.jsonl" if name == "structured" else "mixed.jsonl")
    answers = [(0, tree) for _, tree in read_trace(file, forking=name != "none")]
    shape = shape_of(answers, name)

    scaled = find_profile(name).shape(0, shape.text_tokens)

    for field in (
        "generated_tokens", "threads", "steps", "long_steps", "attended_tokens", "held_tokens",
        "held_tokens_sd", "alive_threads", "alive_threads_sd", "peak_tokens", "sequential_steps",
        "sequential_attended_tokens",
    ):  # fmt: skip
        assert getattr(scaled, field) == pytest.approx(getattr(shape, field), rel=0.01), field


@recorded
def test_the_structured_trace_saves_what_the_paper_saves() -> None:
    shape = shape_of(read_trace(TRACES / "structured.jsonl"), "structured")

    # Tables 1 and 2 of the paper: 12 to 27 % of the cached tokens, 15 to 35 % of the attended.
    assert 0.12 < 1 - shape.peak_tokens / shape.sequential_peak_tokens < 0.27
    assert 0.15 < 1 - shape.attended_tokens / shape.sequential_attended_tokens < 0.35


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(SizingError, match="known are none, mixed, structured"):
        find_profile("wild")
