"""Ask the shared engine, and check that nothing is left of the requests."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.engine_process import EngineProcess
from tests.integration.sampling.asking import Answer, ask, chat

Ask = Callable[..., list[Answer]]


@pytest.fixture
def ask_chat(engine: EngineProcess) -> Ask:
    """Ask one question with each of the settings; check that nothing is left of the requests."""

    def answers(*settings: dict[str, Any]) -> list[Answer]:
        found = engine.call(chat, list(settings))
        assert_nothing_is_left(found)
        return found

    return answers


@pytest.fixture
def ask_prompts(engine: EngineProcess) -> Ask:
    """Ask prompts with the same settings; check that nothing is left of the requests."""

    def answers(prompts: list[Any], **settings: Any) -> list[Answer]:
        found = engine.call(ask, prompts, [settings] * len(prompts))
        assert_nothing_is_left(found)
        return found

    return answers


def assert_nothing_is_left(answers: list[Answer]) -> None:
    assert {(answer.threads_left, answer.blocks_in_use) for answer in answers} == {(0, 0)}
