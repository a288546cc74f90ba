"""Quality evaluation with a real local server as model and judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import EvaluationError
from apar_core.offline.evaluation.chat_endpoint import EndpointSettings
from apar_core.offline.evaluation.prompt_sets import Question
from apar_core.offline.evaluation.quality import (
    Judgment,
    JudgmentRequest,
    QualityPlan,
    QualityResult,
    TokenPrices,
    difference_table,
    run_quality,
    turn_table,
)
from tests.fakes.judge_server import Reply, Script, judge_server
from tests.fakes.progress import NoProgress
from tests.unit.apar_core.offline.evaluation.test_judging import MATH, PROMPTS, WRITING


def answer_file(path: Path, model: str) -> Path:
    lines = [
        {"question_id": question_id, "model_id": model, "choices": [{"turns": ["one", "two"]}]}
        for question_id in (1, 2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def run(folder: Path, script: Script, **changes: Any) -> tuple[QualityResult, int]:
    """Judge both turns of WRITING and MATH; return the result and the number of requests."""
    with judge_server(script) as server:
        plan = QualityPlan(
            prompts="mt-bench",
            questions=changes.pop("questions", (WRITING, MATH)),
            judge_prompts=PROMPTS,
            judge=EndpointSettings(url=server.url, model="judge", retries=1),
            folder=folder / "out",
            answer_files=changes.pop("answer_files", [answer_file(folder / "a.jsonl", "m")]),
            model=EndpointSettings(url=server.url, model="asked")
            if changes.pop("generate", False)
            else None,
            **changes,
        )
        result = await run_quality(plan, NoProgress())
        return result, len(server.requests)


def rows(result: QualityResult, name: str) -> dict[str, list[Any]]:
    tables = json.loads((result.page.parent / "report.json").read_text())["tables"]
    return {row[0]: row[1:] for row in tables[name]["rows"]}


async def test_ratings_are_averaged_by_category_and_by_turn(tmp_path: Path) -> None:
    def rate(body: dict[str, Any], _number: int) -> Reply:
        prompt = body["messages"][-1]["content"]
        return Reply(text="[[8]]" if prompt.startswith(("Q: W", "Write.")) else "Hm. [[3]]")

    prices = TokenPrices(prompt_per_million=10, completion_per_million=100)
    result, num_requests = await run(tmp_path, rate, prices=prices)

    scores = rows(result, "scores_mt-bench")
    assert (scores["Writing"][0], scores["Math"][0], scores["Mean"][0]) == (8, 3, 5.5)
    # The next columns are the paper's O-7B and A-7B.
    assert scores["Math"][1:3] == [2.7, 2.0]
    assert rows(result, "turns")["m"] == [5.5, 5.5, 5.5, None, 4, 0]
    assert rows(result, "cost")["All"] == [4, 400, 40, pytest.approx(0.008)]
    assert num_requests == 4
    assert result.failures == []
    assert "Math" in result.page.read_text()


async def test_a_second_run_sends_no_requests(tmp_path: Path) -> None:
    first, _ = await run(tmp_path, lambda _body, _number: Reply(text="[[6]]"))
    again, num_requests = await run(tmp_path, lambda _body, _number: Reply(text="[[1]]"))

    assert num_requests == 0
    assert rows(again, "turns") == rows(first, "turns")


def test_models_are_compared_over_the_questions_that_both_have_a_rating_for() -> None:
    def judgment(number: int, turn: int, model: str, rating: float | None) -> Judgment:
        return Judgment(
            question_id=str(number),
            turn=turn,
            model=model,
            judge="judge",
            category="math",
            prompt="single",
            rating=rating,
            text="",
            requests=1,
            prompt_tokens=1,
            completion_tokens=1,
        )

    # The questions differ by far more than the models, of which one is always half a point better.
    judgments = [
        judgment(number, turn, model, number + bonus)
        for number in range(1, 9)
        for turn in (1, 2)
        for model, bonus in (("first", 0.0), ("better", 0.5))
    ]
    judgments.append(judgment(9, 1, "first", 1.0))
    judgments += [judgment(10, 1, "better", 10.0), judgment(10, 1, "first", None)]

    [[model, number, difference, interval]] = difference_table(["first", "better"], judgments).rows
    _, row = turn_table(["first", "better"], judgments).rows

    assert (model, number, interval) == ("better", 8, "+0.50 to +0.50")
    assert difference == pytest.approx(0.5)
    low, high = map(float, str(row[4]).split(" to "))
    assert low < float(str(row[3])) < high
    assert high - low > 1


async def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    def broken(_body: object, number: int) -> Reply:
        return Reply(text="[[6]]") if number < 2 else Reply(503, headers={"retry-after-ms": "10"})

    broken_result, _ = await run(tmp_path, broken)
    judgments = tmp_path / "out" / "judgments.jsonl"
    with judgments.open("a") as file:
        file.write('{"question_id": "2", "tu')  # the process was killed while it wrote
    result, num_requests = await run(tmp_path, lambda _body, _number: Reply(text="[[4]]"))

    assert len(broken_result.failures) == 2
    assert "HTTP 503" in broken_result.failures[0]
    assert num_requests == 2
    assert rows(result, "turns")["m"][2:] == [5.0, None, 4, 0]
    assert len(judgments.read_text().splitlines()) == 4


async def test_judgments_without_a_rating_are_repeated_and_counted(tmp_path: Path) -> None:
    def shy(body: dict[str, Any], _number: int) -> Reply:
        is_writing = "Write." in body["messages"][-1]["content"]
        return Reply(text="[[6]]" if is_writing and body["temperature"] else "I would not say.")

    result, num_requests = await run(tmp_path, shy, judgment=JudgmentRequest(attempts=2))

    # Each of the four judgments is requested twice; those of MATH never have a rating.
    assert num_requests == 8
    assert rows(result, "turns")["m"] == [6.0, 6.0, 6.0, None, 4, 2]
    assert rows(result, "scores_mt-bench")["Math"][0] is None
    assert "2 of them without a rating" in result.page.read_text()


async def test_answers_are_generated_turn_by_turn_before_judging(tmp_path: Path) -> None:
    def play(body: dict[str, Any], _number: int) -> Reply:
        if body["model"] == "judge":
            return Reply(text="[[9]]")
        return Reply(text=f"answer {len(body['messages'])} at {body['temperature']}")

    result, num_requests = await run(tmp_path, play, generate=True, answer_files=())

    lines = [json.loads(line) for line in (tmp_path / "out/answers_asked.jsonl").open()]
    turns = {line["question_id"]: line["choices"][0]["turns"] for line in lines}
    assert turns == {
        "1": ["answer 1 at 0.7", "answer 3 at 0.7"],
        "2": ["answer 1 at 0.0", "answer 3 at 0.0"],
    }
    assert {line["completion_tokens"] for line in lines} == {20}
    assert num_requests == 8
    assert rows(result, "turns")["asked"][2] == 9


async def test_a_wrong_key_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="refuses the API key"):
        await run(tmp_path, lambda _body, _number: Reply(401, "bad key"))


@pytest.mark.parametrize(
    ("questions", "files", "message"),
    [
        ((Question(question_id="9", category="x", turns=("?",)),), ["m"], "answers none of the 1"),
        ((WRITING, MATH), ["m", "m"], "two answer files belong to the same model"),
        ((WRITING, MATH), [], "no answer to judge"),
    ],
)
async def test_unusable_answers_are_refused(
    tmp_path: Path, questions: tuple[Question, ...], files: list[str], message: str
) -> None:
    paths = [answer_file(tmp_path / f"{i}.jsonl", model) for i, model in enumerate(files)]

    with pytest.raises(EvaluationError, match=message):
        await run(tmp_path, lambda *_: Reply(), questions=questions, answer_files=paths)
