"""The field `apar.replay` of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apar_core.engine.replay import REPLAY_REQUEST_ARG
from apar_core.errors import RequestError
from deployments.replica.apar_extension import (
    MAX_REPLAY_THREADS,
    MAX_REPLAY_TOKENS,
    parse_options,
    translate,
)

FORK, CHILD, END = 7, 8, 2
CONTROL = frozenset({FORK, CHILD})
TREE = {"": [10, FORK, 11, END], "0": [12, 13, END]}


def test_a_replay_reaches_the_engine_as_json_text() -> None:
    body: dict[str, Any] = {"apar": {"replay": TREE, "enabled": True}, "max_tokens": 9}

    assert translate(body, CONTROL)

    assert body["vllm_xargs"] == {
        "apar_enabled": 1,
        REPLAY_REQUEST_ARG: '{"":[10,7,11,2],"0":[12,13,2]}',
    }
    assert body["max_tokens"] == 9


@pytest.mark.parametrize(
    ("replay", "expected"), [(TREE, 5), ({"": [10, END]}, 2), ({"": [END]}, 1), ({}, 1)]
)
def test_max_tokens_defaults_to_the_length_of_the_replay(
    replay: dict[str, list[int]], expected: int
) -> None:
    body: dict[str, Any] = {"apar": {"replay": replay}, "max_tokens": None}

    translate(body, CONTROL)

    assert body["max_tokens"] == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_clients_limit_is_kept(name: str) -> None:
    body: dict[str, Any] = {"apar": {"replay": TREE}, name: 3}

    translate(body, CONTROL)

    assert body.get("max_tokens", 3) == body[name] == 3


def test_without_a_replay_nothing_is_limited() -> None:
    body: dict[str, Any] = {"apar": {"enabled": False, "replay": None}}

    translate(body, CONTROL)

    assert body == {"vllm_xargs": {"apar_enabled": 0}}


@pytest.mark.parametrize(
    ("replay", "param"),
    [
        ([], "apar.replay"),
        ("abc", "apar.replay"),
        ({"": "abc"}, "apar.replay."),
        ({"": [1, "2"]}, "apar.replay..1"),
        ({"0": [1, 2.0]}, "apar.replay.0.1"),
        ({"0": [True]}, "apar.replay.0.0"),
        ({"": [1] * (MAX_REPLAY_TOKENS + 1)}, "apar.replay"),
        ({str(n): [] for n in range(MAX_REPLAY_THREADS + 1)}, "apar.replay"),
    ],
)
def test_an_invalid_or_oversized_replay_is_refused_by_name(replay: object, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_options({"replay": replay})

    assert raised.value.param == param
    assert len(str(raised.value)) < 300


def test_the_largest_replay_is_accepted() -> None:
    scripts = {str(n): [n] for n in range(MAX_REPLAY_THREADS)}
    scripts["0"] = [5] * (MAX_REPLAY_TOKENS - MAX_REPLAY_THREADS + 1)

    text = parse_options({"replay": scripts}).engine_args()[REPLAY_REQUEST_ARG]

    assert json.loads(str(text)) == scripts


def test_a_beam_search_cannot_be_replayed() -> None:
    with pytest.raises(RequestError, match="impossible in a beam search"):
        translate({"apar": {"replay": TREE}, "use_beam_search": True}, CONTROL)
