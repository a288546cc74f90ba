from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apar_core.errors import DataError
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.data.sources import (
    ItemRefusedError,
    chat_of_item,
    load_questions,
    parse_item,
)

CHAT = [ChatMessage("user", "q"), ChatMessage("assistant", "a")]
QUESTIONS = {"7": ("q", "r")}


@pytest.mark.parametrize(
    "item",
    [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
        {"conversations": [{"role": "user", "content": "q"}, {"role": "model", "content": "a"}]},
        {"messages": [{"from": "user", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "response": "a", "history": []},
        {"prompt": "q", "response": "a"},
        {"question_id": 7, "text": "a"},
        {"question_id": 7, "choices": [{"index": 0, "turns": ["a"]}]},
    ],
)
def test_all_formats_give_the_same_chat(item: dict[str, Any]) -> None:
    assert chat_of_item(item, QUESTIONS) == CHAT


def test_earlier_turns_and_the_system_message_are_kept() -> None:
    item = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "thanks"},
        ]
    }

    chat = chat_of_item(item, {})

    assert [message.role for message in chat] == ["system", "user", "assistant", "user"]
    both = chat_of_item({"question_id": 7, "choices": [{"turns": ["a", "b"]}]}, QUESTIONS)
    assert [message.content for message in both] == ["q", "a", "r", "b"]


def test_developer_messages_are_system_messages() -> None:
    first, *_ = chat_of_item(
        {
            "messages": [
                {"role": "developer", "content": "s"},
                *({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}),
            ]
        },
        {},
    )

    assert first == ChatMessage("system", "s")


def test_a_null_weight_is_none() -> None:
    item = turns("human", "gpt")
    item["conversations"][1]["weight"] = None

    assert chat_of_item(item, {})[1].is_trained


@pytest.mark.parametrize("field", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "item",
    [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "response": "a"},
        {"question_id": 7, "text": "a"},
    ],
)
def test_a_system_field_is_the_system_message(item: dict[str, Any], field: str) -> None:
    assert chat_of_item({**item, field: "s"}, QUESTIONS) == [ChatMessage("system", "s"), *CHAT]
    assert chat_of_item({**item, field: ""}, QUESTIONS) == CHAT
    assert chat_of_item({**item, field: None}, QUESTIONS) == CHAT


def test_a_system_field_may_repeat_the_first_turn_but_not_differ_from_it() -> None:
    item = {"system": "x", **turns("system", "human", "gpt")}

    assert [message.role for message in chat_of_item(item, {})] == ["system", "user", "assistant"]
    item["conversations"][0]["weight"] = 0
    assert len(chat_of_item(item, {})) == 3
    with pytest.raises(ItemRefusedError, match="two system messages"):
        chat_of_item({**item, "system": "y"}, {})


def turns(*roles: str) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ([], "wrong type"),
        ("text", "wrong type"),
        (None, "wrong type"),
        ({}, "missing field"),
        ({"conversations": "x"}, "wrong type"),
        ({"conversations": ["x"]}, "wrong type"),
        ({"conversations": None}, "wrong type"),
        ({"conversations": [{"from": "human"}]}, "missing field"),
        ({"conversations": [{"from": "human", "value": 3}]}, "wrong type"),
        ({"conversations": [{"from": "human", "value": "\ud800"}]}, "no Unicode text"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "unknown role"),
        ({"conversations": [{"from": "gpt", "value": "x", "weight": 0.5}]}, "unknown weight"),
        ({"system": 3, **turns("human", "gpt")}, "wrong type"),
        (turns("robot"), "unknown role"),
        (turns(), "no answer"),
        (turns("human"), "no answer"),
        (turns("gpt", "human", "human"), "roles out of order"),
        (turns("human", "human", "gpt"), "roles out of order"),
        (turns("human", "gpt", "gpt"), "roles out of order"),
        (turns("human", "system", "gpt"), "roles out of order"),
        ({"question_id": 8, "text": "a"}, "no question"),
        ({"question_id": 7, "choices": []}, "missing field"),
        ({"question_id": 7, "choices": [{"turns": "a"}]}, "wrong type"),
        ({"question_id": 7, "choices": [{"turns": [3]}]}, "wrong type"),
        ({"question_id": 7, "choices": [{"turns": ["a", "b", "c"]}]}, "no question"),
        ({"response": "a"}, "missing field"),
        ({"prompt": "q", "response": "a", "history": 3}, "wrong type"),
    ],
)
def test_an_invalid_item_is_refused_with_its_reason(item: Any, reason: str) -> None:
    with pytest.raises(ItemRefusedError) as error:
        chat_of_item(item, QUESTIONS)

    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [(b"{", "broken JSON"), (b'"\xff"', "not UTF-8"), (b"[" * 100_000, "broken JSON")],
)
def test_an_invalid_json_line_is_refused(line: bytes, reason: str) -> None:
    with pytest.raises(ItemRefusedError) as error:
        parse_item(line)

    assert error.value.reason == reason


def test_a_byte_order_mark_is_accepted() -> None:
    assert parse_item(b"\xef\xbb\xbf{}") == {}


@pytest.mark.parametrize(
    "content",
    ["{", "3", '{"question_id": 1}', '{"turns": ["x"]}', '{"question_id": 1, "turns": "x"}'],
)
def test_errors_in_a_question_file_name_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question_id": 7, "turns": ["q", "r"]}\n\n')
    assert load_questions([path]) == QUESTIONS
    path.write_text(content)

    with pytest.raises(DataError, match=r"questions.jsonl, line 1"):
        load_questions([path])
