"""A client's field `apar.replay` in a real engine: generated to the token, or refused."""

import json
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from apar_core.engine.replay import PARAM, REPLAY_REQUEST_ARG, replayed_tokens
from tests.integration.engine_process import EngineProcess
from tests.integration.sampling.asking import (
    FULL_TEXT,
    QUESTION,
    ask,
    chat,
    full_ids,
    replayed,
    token_id,
)
from tests.integration.sampling.conftest import Ask

pytestmark = pytest.mark.engine


def asked_for(scripts: dict[str, list[int]], **settings: Any) -> dict[str, Any]:
    """Settings as the HTTP layer makes them of a client's replay."""
    extra_args = {REPLAY_REQUEST_ARG: json.dumps(scripts), **settings.pop("extra_args", {})}
    return {"temperature": 0.0, "max_tokens": 200, **settings, "extra_args": extra_args}


def forked() -> dict[str, list[int]]:
    return replayed_tokens(replayed()["extra_args"])


def flat() -> dict[str, list[int]]:
    return {"": [*full_ids(), token_id("<eos>")]}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.5, "top_p": 0.9, "seed": 3},
        {"repetition_penalty": 1.3},
        {"n": 2, "temperature": 1.0},
    ],
    ids=["greedy", "sampled", "penalised", "two choices"],
)
def test_an_answer_is_the_same_text_forked_and_flat(
    ask_chat: Ask, settings: dict[str, Any]
) -> None:
    as_threads, as_one = ask_chat(
        asked_for(forked(), **settings),
        asked_for(flat(), **settings, extra_args={"apar_enabled": 0}),
    )

    for answer, threads in ((as_threads, 4), (as_one, 1)):
        for choice in answer.choices:
            assert choice.text == FULL_TEXT
            assert choice.finish_reason == "stop"
        assert answer.statistics is not None
        assert answer.statistics.threads == threads * len(answer.choices)
    assert as_threads.statistics is not None
    assert as_one.statistics is not None
    assert as_threads.statistics.text_tokens == as_one.statistics.text_tokens
    assert as_threads.statistics.decode_steps < as_one.statistics.decode_steps


def test_a_limit_that_just_covers_the_answer_leaves_it_whole(ask_chat: Ask) -> None:
    limit = len(full_ids()) + 1

    answers = ask_chat(
        asked_for(forked(), max_tokens=limit),
        asked_for(flat(), max_tokens=limit, extra_args={"apar_enabled": 0}),
    )

    assert [answer.choice.text for answer in answers] == [FULL_TEXT] * 2
    assert [answer.choice.finish_reason for answer in answers] == ["stop"] * 2


def test_prompts_of_one_request_are_all_replayed(engine: EngineProcess) -> None:
    settings = asked_for(forked())

    # The same mapping of extra arguments, as of the prompts of one HTTP request.
    answers = engine.call(ask, ["One", "Two"], [settings, settings])

    assert [answer.choice.text for answer in answers] == [FULL_TEXT] * 2


@pytest.mark.parametrize(
    ("scripts", "settings", "message"),
    [
        ({"": [5, 10**6]}, {}, "has token id 1000000"),
        ({"": "tree"}, {"max_tokens": 5}, "more than `max_tokens` allows: 5"),
        ({"": "tree"}, {"extra_args": {"apar_enabled": 0}}, "does not fork"),
        ({"": "tree"}, {"min_tokens": 3}, "does not fork"),
        (
            {"": "tree"},
            {"structured_outputs": {"regex": "a+"}},
            "cannot be combined with structured outputs",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    engine: EngineProcess, scripts: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    given = forked() if scripts[""] == "tree" else scripts
    if "structured_outputs" in settings:
        settings = {"structured_outputs": StructuredOutputsParams(regex="a+")}

    with pytest.raises(VLLMValidationError, match=message) as raised:
        engine.call(chat, [asked_for(given, **settings)], QUESTION)

    assert raised.value.parameter == PARAM
