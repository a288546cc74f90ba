"""A server replays recorded answers exactly, forked and flat."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

import openai
import pytest

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.evaluation.replay_text import load_text
from apar_core.tree import tree_statistics
from cluster.loadtest.replay_answers import ReplayAnswer, replay_answers
from cluster.loadtest.trace import read_trace
from tests.integration.serving.apar_process import ENGINE, TINY, Server, serving, slowed
from tests.integration.serving.killed_streams import Victims

pytestmark = pytest.mark.cluster
ANSWERS = Path(__file__).resolve().parents[2] / "data" / "recorded_answers.jsonl"
TEXT = load_text(str(checkpoint_path()))
KILL_AFTER = 10  # pieces of text
WITHOUT_WEIGHTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Replaying:
    """A server of one model that replays recorded answers."""

    server: Server
    model: str

    @property
    def client(self) -> openai.OpenAI:
        return self.server.openai()


@pytest.fixture(scope="module")
def weightless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas with random weights: the checkpoint has none."""
    folder = tmp_path_factory.mktemp("replay")
    model = folder / "no-weights"
    model.mkdir()
    for name in WITHOUT_WEIGHTS:
        copyfile(checkpoint_path() / name, model / name)
    engine = {**TINY["engine"], "load_format": "dummy"}
    replaying = TINY | {"checkpoint": str(model), "replicas": 2, "replay": True, "engine": engine}
    with serving(folder, replaying) as server:
        yield server


@pytest.fixture(params=["apar-tiny", pytest.param("no-weights", marks=pytest.mark.slow)])
def replaying(request: pytest.FixtureRequest) -> Replaying:
    fixture = "server" if request.param == "apar-tiny" else "weightless"
    return Replaying(request.getfixturevalue(fixture), request.param)


@pytest.fixture(scope="module")
def answers() -> list[ReplayAnswer]:
    lines = read_trace(ANSWERS)
    found, _ = replay_answers(lines, TEXT, TEXT.tokens, max_tokens=2048)
    assert len(found) == len(lines)
    assert any(answer.num_threads == 1 for answer in found)
    assert any(answer.num_threads > 3 for answer in found)
    return found


def body(answer: ReplayAnswer, *, forked: bool) -> dict[str, Any]:
    return {"extra_body": {"apar": answer.apar_field(forked=forked)}}


def messages(answer: ReplayAnswer) -> Any:
    return [message.as_dict() for message in answer.messages]


def whole(replaying: Replaying, answer: ReplayAnswer, *, forked: bool) -> Any:
    return replaying.client.chat.completions.create(
        model=replaying.model, messages=messages(answer), **body(answer, forked=forked)
    )


def streamed(
    replaying: Replaying, answer: ReplayAnswer, *, forked: bool, request_id: str = ""
) -> Any:
    return replaying.client.chat.completions.create(
        model=replaying.model,
        messages=messages(answer),
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": request_id} if request_id else None,
        **body(answer, forked=forked),
    )


def check_statistics(answer: ReplayAnswer, found: dict[str, int], *, forked: bool) -> None:
    expected = tree_statistics(answer.tree, len(answer.prompt_ids))
    assert found["text_tokens"] == answer.text_tokens
    assert found["threads"] == (answer.num_threads if forked else 1)
    assert found["sequential_steps"] == expected.sequential_steps
    steps = expected.decode_steps if forked else expected.sequential_steps
    assert found["decode_steps"] == steps


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "flat"])
def test_recorded_answers_come_back_to_the_letter(
    replaying: Replaying, answers: list[ReplayAnswer], forked: bool
) -> None:
    def ask(answer: ReplayAnswer) -> tuple[Any, list[Any]]:
        return (
            whole(replaying, answer, forked=forked),
            list(streamed(replaying, answer, forked=forked)),
        )

    with ThreadPoolExecutor(8) as executor:
        given = list(executor.map(ask, answers))

    for answer, (completion, chunks) in zip(answers, given, strict=True):
        expected = TEXT.decode(answer.flat)
        assert completion.choices[0].message.content == expected
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == expected
        assert completion.choices[0].finish_reason == "stop"
        assert completion.usage.prompt_tokens == len(answer.prompt_ids)
        for found in (completion.model_extra["apar"], chunks[-1].model_extra["apar"]):
            check_statistics(answer, found, forked=forked)


def test_completions_are_replayed_too(replaying: Replaying, answers: list[ReplayAnswer]) -> None:
    for forked in (True, False):
        given = replaying.client.completions.create(
            model=replaying.model, prompt="The best tea", **body(answers[0], forked=forked)
        )
        assert given.choices[0].text == TEXT.decode(answers[0].flat)


@pytest.mark.slow
@pytest.mark.parametrize("forked", [True, False], ids=["forked", "flat"])
@pytest.mark.parametrize("kills_replica", [True, False], ids=["replica", "engine"])
def test_a_replay_continues_where_a_lost_replica_stopped(
    weightless: Server,
    answers: list[ReplayAnswer],
    forked: bool,
    kills_replica: bool,
) -> None:
    answer = max(answers, key=lambda each: each.num_threads)
    weightless.wait_for_replicas(2)
    replaying = Replaying(weightless, "no-weights")
    victims = Victims(weightless)
    text, pieces = "", 0
    statistics: dict[str, int] = {}
    request_id = uuid.uuid4().hex

    with slowed(weightless.processes(ENGINE)):
        for chunk in streamed(replaying, answer, forked=forked, request_id=request_id):
            if chunk.choices and chunk.choices[0].delta.content:
                text += chunk.choices[0].delta.content
                pieces += 1
                if pieces == KILL_AFTER:
                    victims.kill(replica=kills_replica)
            statistics = (chunk.model_extra or {}).get("apar") or statistics

    assert pieces > KILL_AFTER
    assert weightless.record(request_id)["continued"] >= 1
    assert text == TEXT.decode(answer.flat)
    check_statistics(answer, statistics, forked=forked)


@pytest.mark.parametrize(
    ("apar", "settings", "message"),
    [
        ({"replay": {"": [5, 999_999]}}, {}, "id 999999"),
        ({"replay": {"": [5, 2], "7": [2]}}, {}, "'7'"),
        ({"replay": {"0": [5]}}, {}, "replay"),
        ({"replay": {"": "text"}}, {}, "valid list"),
        ({"replay": {"": [5] * 400}}, {"max_tokens": 3}, "end token"),
    ],
)
def test_an_invalid_replay_gets_a_400_that_names_it(
    server: Server, apar: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        server.openai().completions.create(
            model="apar-tiny", prompt="Hi", extra_body={"apar": apar}, **settings
        )

    assert str(raised.value.param).startswith("apar.replay")
