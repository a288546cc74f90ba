"""`run_forks` and its report with an engine that gives made answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.apar_tiny_threadweaver import checkpoint_path as joining_path
from apar_core.offline.data.records import ParagraphRecord, chain, flat_text, token_tree
from apar_core.offline.evaluation.fork_answers import GeneratedAnswer, fork_facts
from apar_core.offline.evaluation.fork_report import fork_report
from apar_core.offline.evaluation.forks import (
    ForkEvaluationSettings,
    ForkResults,
    ReplayedAnswer,
    RunFigures,
    run_forks,
)
from apar_core.offline.evaluation.replay_text import load_text
from apar_core.tree.threads import thread_scripts
from tests.fakes.progress import NoProgress
from tests.integration.random_checkpoint import write_checkpoint

TINY = str(checkpoint_path())
LIST = chain(
    [
        ("1. Tune first:", ParagraphRecord(" Check every string.")),
        ("\n2. Play songs:", ParagraphRecord(" Pick songs you like.")),
        ("\n3. Rest now:", ParagraphRecord(" Sore fingers need a day.")),
    ]
)
SHORT = ParagraphRecord("Yes.")


class MadeAnswers:
    """An engine that gives even questions a list with forks, and odd ones a short answer."""

    context_tokens = 2048

    def __init__(self, log: list[str], fail_after: int | None = None) -> None:
        self._text = load_text(TINY)
        self._log = log
        self._left = fail_after

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        *,
        forks: bool,
    ) -> list[GeneratedAnswer]:
        self._count("answers")
        found = []
        for each in sampling:
            self._log.append(f"{'forks' if forks else 'alone'} {each['seed']}")
            record = LIST if each["seed"] % 2 == 0 else SHORT
            found.append(self._generated(record if forks else ParagraphRecord(flat_text(record))))
        return found

    def _generated(self, record: ParagraphRecord) -> GeneratedAnswer:
        tree = token_tree(record, self._text.encode)
        facts = fork_facts(tree, lambda ids: self._text.decode(list(ids)))
        threads = thread_scripts(tree, 3, 2)
        ids = tuple(self._text.encode(flat_text(record)))
        return GeneratedAnswer(flat_text(record), ids, threads, "stop", {}, 0, 0, facts)

    def log_losses(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[float]:
        self._count("losses")
        return [0.5 * len(text) for text in texts]

    def run(
        self, answers: Sequence[ReplayedAnswer], *, requests: int, num_answers: int
    ) -> RunFigures:
        self._count("run")
        forked = answers[0].forked
        self._log.append(f"run {requests} {'forked' if forked else 'alone'} {num_answers}")
        return RunFigures(
            answers=num_answers,
            text_tokens=100,
            duration_s=1.0,
            tokens_per_s=200.0 if forked else 100.0,
            latency_s=1.0,
            steps=10,
            peak_kv_tokens=64,
            attended_tokens=None,
        )

    def _count(self, kind: str) -> None:
        if self._left == 0:
            raise KeyboardInterrupt(kind)
        self._left = None if self._left is None else self._left - 1

    def shutdown(self) -> None:
        self._log.append("shutdown")


def evaluate(folder: Path, log: list[str], fail_after: int | None = None, **changed: Any) -> Any:
    settings = ForkEvaluationSettings(
        **{
            "model": TINY,
            "model_name": "forked",
            "base": TINY,
            "base_name": "original",
            "prompts": "held-out",
            "limit": 4,
            "requests": (1, 12),
            "repeats": 3,
            **changed,
        }
    )
    return run_forks(settings, folder, lambda _: MadeAnswers(log, fail_after), NoProgress())


def table(results: ForkResults, name: str) -> list[tuple[Any, ...]]:
    found = {each.name: each for each in fork_report(results).tables}
    return list(found[name].rows)


def test_numbers_of_the_report_are_those_of_the_answers(tmp_path: Path) -> None:
    results = evaluate(tmp_path, [])

    numbers = fork_report(results).data["numbers"]
    assert numbers["answer_precision"]["value"] == numbers["answer_recall"]["value"] == 1
    assert numbers["others_forked"]["value"] == 0
    assert numbers["place_precision"]["value"] == numbers["place_recall"]["value"] == 1
    # Two answers do not fork, and are those of the other engine.
    assert numbers["equal_to_base"]["value"] == 1
    assert table(results, "equality")[0][0] == 2
    assert numbers["loss_ratio"]["value"] == pytest.approx(1)
    assert table(results, "log-loss")[0][:2] == ("forked answers", pytest.approx(0.5))
    assert numbers["speed_sequential_12"]["value"] == pytest.approx(2)
    assert numbers["recorded_recall"]["value"] > 0.9
    # The base is the same model here.
    assert numbers["recorded_loss_ratio"]["value"] == 1
    assert [row[:2] for row in table(results, "recorded-loss")] == [("the rules fork", 4)]
    answers = table(results, "answers")
    assert [row[:3] for row in answers[:3]] == [
        ("Mean of all", 4, 2.5),
        ("forked", 2, 4),
        ("without forks", 2, 1),
    ]
    json.dumps(numbers)


def test_only_sequential_runs_have_a_ratio(tmp_path: Path) -> None:
    rows = table(evaluate(tmp_path, []), "speed")

    assert [row[0] for row in rows] == [1, 1, 1, 12, 12, 12]
    assert [row[4] for row in rows[:3]] == pytest.approx([None, 2.0, 2.0])
    assert rows[1][5] == "2.00 to 2.00"


def test_runs_take_turns_and_measure_as_many_answers_as_requests(tmp_path: Path) -> None:
    log: list[str] = []
    evaluate(tmp_path, log, repeats=2)

    runs = [line for line in log if line.startswith("run")]
    warm_up, first, second = runs[:3], runs[3:9], runs[9:]
    assert all(line.endswith(" 1") for line in warm_up)
    assert first[:3] == ["run 1 forked 8", "run 1 alone 8", "run 1 alone 8"]
    assert first[3:] == ["run 12 forked 12", "run 12 alone 12", "run 12 alone 12"]
    assert second[:3] == ["run 1 alone 8", "run 1 alone 8", "run 1 forked 8"]


@pytest.mark.parametrize("fail_after", [0, 1, 2, 3, 8])
def test_an_interrupted_run_continues(tmp_path: Path, fail_after: int) -> None:
    whole = evaluate(tmp_path / "whole", [])
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "interrupted", [], fail_after)
    log: list[str] = []

    continued = evaluate(tmp_path / "interrupted", log)

    assert continued == whole
    again: list[str] = []
    assert evaluate(tmp_path / "interrupted", again) == whole
    assert again == []


def test_a_finished_run_takes_more_repeats_but_no_other_temperature(tmp_path: Path) -> None:
    evaluate(tmp_path, [], repeats=1, requests=(1,))
    log: list[str] = []
    evaluate(tmp_path, log, repeats=2, requests=(1,))

    assert not [line for line in log if line.startswith(("forks", "alone"))]
    assert len([line for line in log if line.startswith("run 1") and line.endswith("8")]) == 3
    with pytest.raises(EvaluationError, match=r"temperature was '0\.0', is '0\.5'"):
        evaluate(tmp_path, [], temperature=0.5)


def test_what_needs_a_base_model_says_so(tmp_path: Path) -> None:
    results = evaluate(tmp_path, [], base=None, base_name=None, repeats=1)

    report = fork_report(results)
    assert "none given (--base)" in report.facts["Base model"]
    assert not {"equality", "log-loss"} & {each.name for each in report.tables}
    assert not {"equal_to_base", "loss_ratio", "speed_base_1"} & report.data["numbers"].keys()


def test_sampled_answers_are_not_compared_with_the_base_models(tmp_path: Path) -> None:
    results = evaluate(tmp_path, [], temperature=1.0, repeats=1)

    report = fork_report(results)
    assert report.data["numbers"]["equal_to_base"] is None
    assert table(results, "equality")[0][1:] == (None, None, None)


def test_places_of_forks_are_not_counted_if_threads_wait(tmp_path: Path) -> None:
    results = evaluate(
        tmp_path, [], model=str(joining_path()), base=None, base_name=None, repeats=1
    )

    report = fork_report(results)
    assert "threadweaver wait for their children" in report.facts["Places of forks"]
    assert not {"rules-by-answer", "rules-by-place", "recorded"} & {t.name for t in report.tables}


def test_a_model_that_cannot_fork_is_told_how_to(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain")

    with pytest.raises(EvaluationError, match=r"cannot fork: .*apar convert plain --out DIR"):
        evaluate(tmp_path / "out", [], model=str(folder), model_name="plain", base=None)


def test_recorded_answers_of_a_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    lines = [
        {"id": "a", "category": "x", "prompt": "Tips?", "response": flat_text(LIST), "history": []},
        {"id": "b", "category": "y", "prompt": "Well?", "response": "Yes.", "history": []},
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    results = evaluate(tmp_path / "out", [], prompts=str(file), repeats=1)

    counts = {each.kind: each.rule_places for each in results.forced}
    assert counts == {"ordered_list": 3, "unstructured": 0}


def test_a_base_without_control_tokens_reads_recorded_answers_in_one_thread(
    tmp_path: Path,
) -> None:
    base = write_checkpoint(tmp_path / "plain")

    results = evaluate(tmp_path / "out", [], base=str(base), repeats=1)

    for ours, theirs in results.recorded:
        assert ours.example == theirs.example
        assert ours.tokens > 0
        # Random weights know less than the model whose corpus this is.
        assert theirs.nats / theirs.tokens > 3 * ours.nats / ours.tokens
    again = evaluate(tmp_path / "out", [], base=str(base), repeats=1)
    assert again.recorded == results.recorded


def test_no_speed_is_measured_if_nothing_forks(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"prompt": "Well?"}\n')

    # The seed makes the only answer a short one.
    results = evaluate(tmp_path / "out", [], prompts=str(file), seed=1)

    report = fork_report(results)
    assert report.facts["Speed"] == "not measured: no answer forks and ends by itself"
    assert report.facts["Recorded answers"].endswith("no forks were compared with them")
    assert not report.figures
