"""One engine with the embedded model for all tests of this folder."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apar_core.engine.replay import REPLAY
from tests.integration.engine_process import EngineProcess
from tests.integration.sampling.asking import Answer, ask, chat

Ask = Callable[..., list[Answer]]


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(
        logits_processors=[REPLAY],
        # The small model could write white space for ever.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    yield process
    process.close()


@pytest.fixture
def ask_chat(engine: EngineProcess) -> Ask:
    """Ask one question with each of the settings; afterwards nothing may be left of them."""

    def answers(*settings: dict[str, Any]) -> list[Answer]:
        found = engine.call(chat, list(settings))
        assert_nothing_is_left(found)
        return found

    return answers


@pytest.fixture
def ask_prompts(engine: EngineProcess) -> Ask:
    """Ask prompts with the same settings; afterwards nothing may be left of them."""

    def answers(prompts: list[Any], **settings: Any) -> list[Answer]:
        found = engine.call(ask, prompts, [settings] * len(prompts))
        assert_nothing_is_left(found)
        return found

    return answers


def assert_nothing_is_left(answers: list[Answer]) -> None:
    assert {(answer.threads_left, answer.blocks_in_use) for answer in answers} == {(0, 0)}
