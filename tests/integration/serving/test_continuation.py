"""Streams continue and whole answers arrive although the replica that serves them is killed."""

import json
import threading
import uuid
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from tests.integration.serving.apar_process import ENGINE, Server, authorization, slowed
from tests.integration.serving.killed_streams import BODIES, TIMEOUT_S, Victims, stream

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KILL_AFTER = {
    "chat": 1,
    "tagged chat": 15,
    "unforked chat": 45,
    "short chat": 1,
    "completion": 12,
    "chat that stops": 3,
}
"""Pieces of text after which a stream's replica is killed: early enough that more must come."""


@pytest.mark.parametrize("kills_replica", [True, False])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name == "chat")) for name in BODIES]
)
def test_a_stream_whose_replica_is_killed_equals_the_uninterrupted_one(
    replicated: Server, name: str, kills_replica: bool
) -> None:
    expected = stream(replicated, name)

    victims = Victims(replicated)

    kill = partial(victims.kill, replica=kills_replica)
    answer = stream(replicated, name, KILL_AFTER[name], kill)

    assert answer.errors == []
    assert answer.text == expected.text
    assert (answer.finish, answer.usage) == (expected.finish, expected.usage)
    assert answer.apar == expected.apar
    assert len(answer.ids) == 1
    assert answer.roles == expected.roles
    assert answer.reader.threads == expected.reader.threads
    assert replicated.record(answer.request_id)["continued"] >= 1


def test_a_stream_that_loses_two_replicas_continues_at_the_third(replicated: Server) -> None:
    expected = stream(replicated, "unforked chat")
    victims = Victims(replicated)
    killer = threading.Thread(target=victims.kill_at_work, kwargs={"replica": True})

    def kill_now_and_again() -> None:
        victims.kill(replica=True)
        killer.start()

    answer = stream(replicated, "unforked chat", 3, kill_now_and_again)
    killer.join()

    assert (answer.errors, answer.text) == ([], expected.text)
    assert (answer.finish, answer.usage) == (expected.finish, expected.usage)
    assert replicated.record(answer.request_id)["continued"] >= 2


@pytest.mark.parametrize("kills_replica", [False, True])
def test_a_whole_answer_whose_replica_is_killed_is_generated_again(
    replicated: Server, kills_replica: bool
) -> None:
    path, body = BODIES["unforked chat"]
    body = body | {"temperature": 0}
    expected = replicated.post(path, json=body).json()

    victims = Victims(replicated)
    killer = threading.Thread(target=victims.kill_at_work, kwargs={"replica": kills_replica})
    headers = {"x-request-id": uuid.uuid4().hex}

    killer.start()
    answer = replicated.post(path, json=body, headers=headers)
    killer.join()

    record = replicated.record(headers["x-request-id"])
    assert answer.status_code == 200
    assert answer.json()["choices"] == expected["choices"]
    assert record["retries"] >= 1
    assert record["continued"] == 0


def text_of(lines: Iterator[str], num_characters: int) -> str:
    """Read a stream until it has so many characters of text."""
    text = ""
    while len(text) < num_characters:
        if (line := next(lines)).startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["delta"].get("content") or ""
    return text


def test_a_client_that_leaves_a_moved_stream_leaves_nothing_behind(replicated: Server) -> None:
    path, body = BODIES["unforked chat"]
    body = body | {"stream": True, "max_tokens": 1500}
    headers = authorization() | {"x-request-id": uuid.uuid4().hex}
    victims = Victims(replicated)
    with httpx.stream(
        "POST", replicated.url + path, json=body, headers=headers, timeout=TIMEOUT_S
    ) as response:
        lines = response.iter_lines()
        with slowed(replicated.processes(ENGINE)):
            text_of(lines, 1)
            victims.kill(replica=True)
        # More than the killed replica can have sent, and less than the answer has.
        text_of(lines, 1000)

    record = replicated.record(headers["x-request-id"])
    assert record["continued"] >= 1
    assert record["cancelled"] is True
    replicated.wait_for_replicas(2)
    replicated.wait_until_idle(2)
