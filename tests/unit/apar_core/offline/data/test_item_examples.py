from typing import Any

from apar_core.offline.data.prepare import ItemPreparation, Outcome, PreparedAnswer, Refusal
from apar_core.offline.data.sources import SourceItem
from apar_core.offline.data.structure import StructureRules


def outcomes(*turns: tuple[str, str]) -> list[Outcome]:
    item: Any = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    source = SourceItem(source="chats/a.json", number=3, unit="item", value=item)
    return list(ItemPreparation(StructureRules(), {}).outcomes(source))


def test_every_answer_of_a_chat_becomes_an_example_behind_the_turns_before_it() -> None:
    first, second = outcomes(("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", "a2"))

    assert isinstance(first, PreparedAnswer)
    assert isinstance(second, PreparedAnswer)
    assert b'"id": "chats/a:3:1"' in first.line
    assert b'"id": "chats/a:3:2"' in second.line
    assert second.line.count(b'"role"') == 3


def test_answers_before_the_first_question_are_refused_and_the_rest_is_kept() -> None:
    refusal, example = outcomes(("system", "s"), ("gpt", "a0"), ("human", "q1"), ("gpt", "a1"))

    assert isinstance(refusal, Refusal)
    assert refusal.reason == "answer without a question"
    assert isinstance(example, PreparedAnswer)
    assert b"a0" not in example.line
    assert b'"role": "system"' in example.line


def test_an_empty_answer_ends_the_chat() -> None:
    example, refusal = outcomes(
        ("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", " "), ("human", "q3"), ("gpt", "a")
    )

    assert isinstance(example, PreparedAnswer)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "empty answer"
