from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from apar_core.errors import EvaluationError
from cluster.experiments import side_by_side
from cluster.experiments.driver import Drive, RunPlan, Served
from cluster.experiments.experiment_engine import Conditions, StepCounts
from cluster.experiments.peers import runs
from cluster.experiments.peers.methods import build_questions, marker_id
from cluster.experiments.peers.runs import (
    PeerRunner,
    PeerSettings,
    RunKey,
    RunStore,
    keys_of,
    run_of,
)
from cluster.experiments.run_watch import RunWatch
from cluster.experiments.samples import Sample
from tests.unit.cluster.experiments.peers.played import unforked_answer
from tests.unit.cluster.experiments.peers.test_skeleton_of_thought import LetterText
from tests.unit.cluster.experiments.peers.test_table import run

KEY = RunKey(method="client-forking", kv_share=0.5, round=0)


def test_methods_take_turns_within_a_share_and_sequential_decoding_comes_first() -> None:
    settings = PeerSettings(
        trace=Path("t"), methods=("eager", "sequential"), rounds=2, kv_shares=(0.2, 0.9)
    )

    assert [(key.round, key.kv_share, key.method) for key in keys_of(settings)] == [
        (0, 0.2, "sequential"), (0, 0.2, "eager"), (0, 0.9, "sequential"), (0, 0.9, "eager"),
        (1, 0.2, "sequential"), (1, 0.2, "eager"), (1, 0.9, "sequential"), (1, 0.9, "eager"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("methods", "message"),
    [(("sequential", "magic"), "no method magic"), (("eager",), "sequential must be among")],
)
def test_methods_that_cannot_be_compared_are_refused(methods: tuple[str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PeerSettings(trace=Path("t"), methods=methods)


def test_finished_runs_are_found_again(tmp_path: Path) -> None:
    settings = PeerSettings(trace=Path("t"))
    finished = run("eager", 1, 12.0)
    RunStore(tmp_path, settings).add(finished)

    assert RunStore(tmp_path, settings).lines == {finished.key: finished}


def test_markers_count_as_no_text_and_last_tokens_as_not_computed() -> None:
    served = tuple(Served(str(i), "generic", 50, float(i), None) for i in (1, 3))
    counts = StepCounts(steps=10, rows=40, text_tokens=125, computed_tokens=300, preemptions=2)
    samples = tuple(
        Sample(at_s, speed, 0.0, 4.0, True)
        for at_s, speed in enumerate((9.0, 9.0, 20.0, 25.0, 30.0))
    )
    whole = Sample(5.0, 25.0, 0.0, 4.0, False)
    drive = Drive(5.0, served, samples, whole, counts, 4096, 0, 0)
    watch = RunWatch(sequences=6, generated_tokens=140, peak_kv_tokens=512)

    found = run_of(KEY, drive, watch, Conditions())

    # The first two samples warm up; of 125 tokens generated, 25 were markers.
    assert (found.text_tokens, found.tokens_per_s) == (100, 25.0 * 100 / 125)
    assert (found.kept_samples, found.whole_tokens_per_s) == (3, 20.0)
    # 140 tokens of 6 sequences: 134 of them were computed as they were generated.
    assert found.prompt_tokens == 300 - 134
    assert (found.latency_mean_s, found.latency_p99_s, found.step_s) == (2.0, 3.0, 0.5)


def test_a_run_of_too_few_samples_has_the_throughput_of_all_of_it() -> None:
    served = (Served("1", "generic", 100, 1.0, None),)
    counts = StepCounts(steps=10, rows=40, text_tokens=100, computed_tokens=300)
    samples = tuple(Sample(float(at_s), 99.0, 0.0, 4.0, True) for at_s in (1, 2, 3))
    drive = Drive(5.0, served, samples, samples[0], counts, 4096, 0, 0)

    found = run_of(KEY, drive, RunWatch(), Conditions())

    assert (found.kept_samples, found.tokens_per_s) == (0, 20.0)


@pytest.mark.parametrize("engines", [1, 2])
def test_the_adaptive_policy_learns_before_the_run_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: int
) -> None:
    driven: list[tuple[list[int], list[bool], int]] = []
    watching: list[object] = []

    @contextmanager
    def played_watch(engine: object) -> Iterator[RunWatch]:
        watching.append(engine)
        yield RunWatch()
        watching.remove(engine)

    def played(plans: Sequence[RunPlan], **_: Any) -> list[Any]:
        numbers = [plan.num_questions for plan in plans]
        driven.append((numbers, [plan.conditions.keeps_learned for plan in plans], len(watching)))
        return [SimpleNamespace(wall_s=1.0, counts=SimpleNamespace(steps=10))] * len(plans)

    monkeypatch.setattr(runs, "watched", played_watch)
    monkeypatch.setattr(runs, "drive_side_by_side", played)
    monkeypatch.setattr(side_by_side, "drive", lambda plan, **given: played([plan])[0])
    monkeypatch.setattr(runs, "run_of", lambda key, *given: run(key.method, 0, 10.0))
    settings = PeerSettings(trace=Path("t"), methods=("sequential", "adaptive"), kv_shares=(0.5,))
    questions: Any = range(20)
    names: Any = range(engines)
    runner = PeerRunner(names, questions, 9, settings, RunStore(tmp_path, settings))

    for keys in runner.groups(keys_of(settings)[:2]):
        runner.run(keys)

    if engines == 1:
        assert driven == [([20], [False], 1), ([8], [False], 0), ([20], [True], 1)]
    else:
        assert driven == [([8], [False], 0), ([8], [False], 0), ([20, 20], [False, True], 2)]


def test_a_marker_is_a_special_token_that_no_fork_or_end_uses() -> None:
    tokenizer = SimpleNamespace(bos_token_id=1, pad_token_id=0, unk_token_id=None)

    assert marker_id(tokenizer, (2, 3, 4)) == 1
    assert marker_id(tokenizer, (1, 3, 4)) == 0
    with pytest.raises(EvaluationError, match="no special token"):
        marker_id(tokenizer, (0, 1))


def test_questions_whose_prompts_are_too_long_for_any_method_are_left_out(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "prompt": "How?", "response": "Ten eleven twelve."}\n')
    answers = [unforked_answer()]

    assert len(build_questions(answers, trace, LetterText(), max_model_tokens=100)) == 1
    with pytest.raises(EvaluationError, match="none of 1 answers fits into 9 tokens"):
        build_questions(answers, trace, LetterText(), max_model_tokens=9)
