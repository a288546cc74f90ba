"""Request bodies of replays and of plain prompts from every source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from cluster.loadtest.jobs import Job, ModelCard, PlannedJobs, WorkloadSettings, build_jobs
from deployments.config.model import PRESETS

CARD = ModelCard(id="apar-tiny", root=PRESETS["apar-tiny"].path, max_model_len=1024)
LIST = "Two tips:\n\n1. Tune first: check every string.\n2. Play slowly: speed comes by itself."


def trace(folder: Path, *answers: str) -> Path:
    path = folder / "trace.jsonl"
    lines = [
        {"id": number, "category": "writing", "prompt": f"Tips {number}?", "response": answer}
        for number, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def planned(spec: str, **fields: Any) -> PlannedJobs:
    return build_jobs(WorkloadSettings(spec=spec, **fields), CARD)


def build(spec: str, **fields: Any) -> list[Job]:
    return list(planned(spec, **fields).jobs)


def body(job: Job) -> dict[str, Any]:
    return dict(json.loads(job.body))


def test_a_replay_names_the_tokens_of_every_thread(tmp_path: Path) -> None:
    (forked,) = build(f"replay:{trace(tmp_path, LIST)}")
    (flat,) = build(f"replay:{trace(tmp_path, LIST)}", flat=True)

    sent, sent_flat = body(forked), body(flat)
    assert (forked.id, forked.category) == ("0", "writing")
    assert sent["messages"] == [{"role": "user", "content": "Tips 0?"}]
    assert {"", "0"} <= set(sent["apar"]["replay"])
    assert sent["apar"]["enabled"] is True
    assert sorted(sent_flat["apar"]["replay"]) == [""]
    assert sent_flat["apar"]["enabled"] is False
    assert forked.text_tokens == flat.text_tokens == len(sent_flat["apar"]["replay"][""]) - 1
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["max_tokens"] >= (forked.text_tokens or 0)


def test_recorded_answers_that_exceed_the_context_are_skipped(tmp_path: Path) -> None:
    path = trace(tmp_path, LIST, "word " * 2000)

    assert [job.id for job in build(f"replay:{path}")] == ["0"]
    with pytest.raises(EvaluationError, match="none of 2 answers fits into 10 tokens"):
        build(f"replay:{path}", context_tokens=10)


def test_answers_that_fit_are_chosen_before_they_are_counted(tmp_path: Path) -> None:
    spec = f"replay:{trace(tmp_path, LIST, 'word ' * 2000, LIST, LIST)}"

    two, five = planned(spec, requests=2), planned(spec, requests=5)

    assert [job.id for job in two.jobs] == ["0", "2"]
    assert (two.left_out, two.repeated) == (1, 0)
    assert [job.id for job in five.jobs] == ["0", "2", "3", "0", "2"]
    assert (five.left_out, five.repeated) == (1, 2)
    one = planned(spec, requests=1)
    assert (len(one.jobs), one.left_out) == (1, 0)


def test_a_replay_needs_a_tokenizer(tmp_path: Path) -> None:
    settings = WorkloadSettings(spec=f"replay:{trace(tmp_path, LIST)}")

    with pytest.raises(EvaluationError, match="--tokenizer"):
        build_jobs(settings, ModelCard(id="elsewhere"))


def test_the_prompts_of_a_trace_are_sent_as_they_are(tmp_path: Path) -> None:
    jobs = build(
        f"prompts:{trace(tmp_path, LIST, LIST)}",
        max_tokens=32,
        ignore_eos=True,
        extra_body={"apar": {"max_threads": 2}},
    )

    assert [job.id for job in jobs] == ["0", "1"]
    assert body(jobs[1]) == {
        "model": "apar-tiny",
        "messages": [{"role": "user", "content": "Tips 1?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 32,
        "temperature": 0.0,
        "ignore_eos": True,
        "apar": {"max_threads": 2},
    }
    assert jobs[0].text_tokens is None


def test_a_text_file_has_a_prompt_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Name a bird.\n\nName a tree.\n")

    jobs = build(f"prompts:{path}")

    assert [job.messages[0].content for job in jobs] == ["Name a bird.", "Name a tree."]
    assert [job.id for job in jobs] == ["1", "3"]
    assert "ignore_eos" not in body(jobs[0])


def test_the_held_out_prompts_are_known_by_name() -> None:
    jobs = build("prompts:held-out", requests=5)

    assert len({job.id for job in jobs}) == 5


def test_a_workload_is_repeated_to_the_requested_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\nc\n")

    assert [job.id for job in build(f"prompts:{path}", requests=7)] == list("1231231")
    assert [job.id for job in build(f"prompts:{path}", requests=2)] == list("12")


@pytest.mark.parametrize(
    ("spec", "flat", "problem"),
    [
        ("held-out", False, "workload 'held-out': expected replay:TRACE"),
        ("replay:", False, "workload 'replay:'"),
        ("questions:x", False, "workload 'questions:x'"),
        ("prompts:nothing-here", False, "'nothing-here' is neither"),
        ("prompts:nothing.txt", False, "nothing.txt cannot be read"),
        ("replay:nothing.jsonl", False, "nothing.jsonl cannot be read"),
        ("prompts:held-out", True, "--no-fork is only for --replay"),
    ],
)
def test_an_invalid_workload_is_an_error(spec: str, flat: bool, problem: str) -> None:
    with pytest.raises(EvaluationError) as error:
        build(spec, flat=flat)

    assert problem in str(error.value)


def test_an_empty_text_file_has_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("\n\n")

    with pytest.raises(EvaluationError, match="contains no prompt"):
        build(f"prompts:{path}")
