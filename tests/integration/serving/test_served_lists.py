"""Lists of a real model without trained tokens, through `apar serve`: two replicas, one killed.

Only requests that ask for it fork. What a cancelled thread has written depends on when the engine
learns that the list has ended, so counts of discarded tokens are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from apar_core.models.smollm2 import SMOLLM2
from tests.integration.serving.apar_process import TINY, Server, authorization, serving
from tests.integration.serving.killed_streams import Answer, Victims, read_stream

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not SMOLLM2.folder.is_dir(), reason="`apar fetch` was not run"),
    pytest.mark.timeout(1800),
]
CHAT = "/v1/chat/completions"
LISTS = TINY | {
    "checkpoint": SMOLLM2.name,
    "name": "lists",
    "replicas": 2,
    "kv_cache_gib": 0.5,
    "parallel_format": "lists",
    "forks": {"enabled": False},
}
QUESTION = "List 4 benefits of regular exercise, with an explanation of each."
BODY: dict[str, Any] = {
    "model": "lists",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 180,
    "apar": {"enabled": True},
}
TAGGED = BODY | {"apar": {"enabled": True, "stream": "threads"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lists")
    with serving(folder, LISTS, retries={"replica_wait_s": 300}) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(served: Server) -> Iterator[None]:
    """Check after each test that no replica holds a request, a thread or a KV block."""
    yield
    served.wait_for_replicas(2)
    served.wait_until_idle(2, deployment="Replica-lists")


@pytest.fixture(scope="module")
def whole(served: Server) -> Any:
    """The answer that no stream and no kill has interrupted."""
    return served.post(CHAT, json=BODY).json()


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_only_requests_that_ask_for_it_fork(served: Server, whole: Any) -> None:
    alone = served.post(CHAT, json={k: v for k, v in BODY.items() if k != "apar"}).json()

    assert whole["apar"]["threads"] > 3
    assert whole["apar"]["joins"] > 0
    assert whole["apar"]["decode_steps"] < whole["apar"]["sequential_steps"]
    assert alone["apar"]["threads"] == 1
    # Both have the same first item, and begin the second.
    assert text_of(alone)[:200] == text_of(whole)[:200]


@pytest.mark.parametrize("body", [BODY, TAGGED], ids=["ordinary", "tagged"])
def test_streams_give_the_same_text(served: Server, whole: Any, body: dict[str, Any]) -> None:
    answer = read_stream(served, CHAT, body)

    assert answer.errors == []
    assert answer.text == text_of(whole)
    assert answer.finish == [whole["choices"][0]["finish_reason"]]
    assert answer.usage[0]["completion_tokens"] == whole["usage"]["completion_tokens"]
    if body is TAGGED:
        assert answer.reader.text() == answer.text
        assert len(answer.reader.threads[0]) > 3


def in_the_first_item(answer: Answer) -> bool:
    return answer.num_texts == 8


def writes(thread: str) -> Callable[[Answer], bool]:
    """Return whether a thread has written something and goes on."""

    def found(answer: Answer) -> bool:
        known = answer.reader.threads.get(0, {}).get(thread)
        return known is not None and known["state"] == "writing" and len(known["text"]) > 8

    return found


def goes_on(answer: Answer) -> bool:
    """Return whether the root writes again after it has waited."""
    threads = answer.reader.threads.get(0, {})
    first = threads.get("root.0")
    return first is not None and first["state"] == "ended" and len(threads) > 4


MOMENTS: dict[str, tuple[dict[str, Any], Callable[[Answer], bool]]] = {
    "in the first item": (BODY, in_the_first_item),
    "in the second item's detail": (TAGGED, writes("root.0")),
    "in the third item's detail": (TAGGED, writes("root.1.0")),
    "after the second item": (TAGGED, goes_on),
}


@pytest.mark.parametrize("kills_replica", [True, False], ids=["replica", "engine"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_answer_whose_replica_is_killed_goes_on_in_the_other(
    served: Server, whole: Any, moment: str, kills_replica: bool
) -> None:
    body, when = MOMENTS[moment]
    victims = Victims(served)

    answer = read_stream(served, CHAT, body, when, partial(victims.kill, replica=kills_replica))

    assert answer.errors == []
    assert answer.text == text_of(whole)
    assert answer.usage[0]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert (len(answer.ids), answer.roles) == (1, 1)
    assert body is BODY or answer.reader.text() == answer.text
    assert served.record(answer.request_id)["continued"] >= 1


@pytest.mark.parametrize("thread", ["root.0", "root.1", "root.1.0"])
def test_a_client_that_leaves_in_a_list_leaves_nothing_behind(served: Server, thread: str) -> None:
    with httpx.stream(
        "POST",
        served.url + CHAT,
        json=TAGGED | {"stream": True},
        headers=authorization(),
        timeout=120,
    ) as response:
        assert any(f'"{thread}"' in line for line in response.iter_lines())


@pytest.mark.parametrize("stop", ["2", "\n\n3", "increase", "**"])
def test_a_stop_string_cuts_the_text_where_it_first_stands(
    served: Server, whole: Any, stop: str
) -> None:
    found = served.post(CHAT, json=BODY | {"stop": [stop]}).json()

    assert text_of(found) == text_of(whole).partition(stop)[0]


@pytest.mark.parametrize("max_tokens", [1, 40, 80, 120])
def test_max_tokens_counts_in_reading_order(served: Server, whole: Any, max_tokens: int) -> None:
    found = served.post(CHAT, json=BODY | {"max_tokens": max_tokens}).json()

    assert text_of(whole).startswith(text_of(found))
    assert found["usage"]["completion_tokens"] == max_tokens
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"apar": {"enabled": True, "replay": {"": [1, 2]}}}, "apar.replay"),
        ({"apar": {"enabled": "often"}}, "apar.enabled"),
        ({"apar": {"format": "lists"}}, "apar.format"),
        ({"apar": {"enabled": True, "max_threads": 0}}, "apar.max_threads"),
    ],
)
def test_a_wrong_field_gets_a_400_that_names_it(
    served: Server, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.openai().chat.completions.create(
            model="lists", messages=BODY["messages"], extra_body=change
        )

    assert str(raised.value.param).startswith(param)
