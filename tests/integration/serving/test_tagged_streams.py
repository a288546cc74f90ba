"""Thread-tagged streams of a running server."""

import contextlib
import io
import re
from typing import Any

import httpx
import pytest

from tests.fakes.tagged_streams import TaggedReader, chunks_of, code_blocks
from tests.integration.serving.apar_process import (
    ENGINE,
    TOKEN,
    Server,
    authorization,
    slowed,
)

pytestmark = pytest.mark.cluster
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = "Give me 5 tips for sleeping well."
BODY: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 400,
    "stream": True,
    "apar": {"stream": "threads"},
}
LEAST_CHUNKS = 20
MESSAGES = [{"role": "user", "content": PROMPT}]


def chunks(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream(
        "POST", server.url + path, json=BODY | body, headers=authorization(), timeout=120
    ) as response:
        assert response.status_code == 200, response.read()
        return chunks_of(response.iter_lines())


def read(received: list[dict[str, Any]]) -> tuple[TaggedReader, dict[int, str]]:
    """Read every chunk; return the reader, and the ordered text of each choice."""
    reader, texts = TaggedReader(), dict[int, str]()
    for chunk in received:
        reader.read(chunk["apar"])
        for choice in chunk["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return reader, texts


def test_threads_that_write_at_the_same_time_are_seen_at_the_same_time(server: Server) -> None:
    body = {"messages": MESSAGES, "stream_options": {"include_usage": True}}
    with slowed(server.processes(ENGINE)):
        received = chunks(server, CHAT, body)
    whole = server.post(
        CHAT, json={"messages": MESSAGES, "temperature": 0, "max_tokens": 400}
    ).json()

    assert len(received) >= LEAST_CHUNKS
    reader, texts = read(received)
    assert reader.text() == texts[0] == whole["choices"][0]["message"]["content"]
    threads = reader.threads[0]
    statistics = received[-1]["apar"]
    assert len(threads) == statistics["threads"] == whole["apar"]["threads"] > 4
    # All tokens but the child tokens, which no thread generates.
    num_tokens = statistics["text_tokens"] + statistics["control_tokens"] - statistics["forks"]
    assert sum(thread["tokens"] for thread in threads.values()) == num_tokens
    assert {thread["finish_reason"] for thread in threads.values()} == {"stop"}
    writers = [
        {update["id"] for update in chunk["apar"]["updates"] if update["text"]}
        for chunk in received
    ]
    assert max(map(len, writers)) >= 4
    silent = [
        chunk
        for chunk, each in zip(received, writers, strict=True)
        if each and chunk["choices"] and not chunk["choices"][0]["delta"]["content"]
    ]
    assert silent


@pytest.mark.parametrize(
    ("apar", "body", "message"),
    [
        ({"stream": "threads"}, {}, '`apar.stream` needs `"stream": true`'),
        ({"stream": "threads"}, {"stream": False}, '`apar.stream` needs `"stream": true`'),
        ({"stream": "tokens"}, {"stream": True}, "`apar.stream`: Input should be 'threads'"),
        ({"stream": True}, {"stream": True}, "`apar.stream`: Input should be 'threads'"),
    ],
)
def test_what_cannot_be_tagged_is_refused(
    server: Server, apar: dict[str, Any], body: dict[str, Any], message: str
) -> None:
    answer = server.post(CHAT, json={"messages": MESSAGES, "apar": apar} | body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "apar.stream"
    assert answer.json()["error"]["message"] == message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "n": 3, "temperature": 1.0, "seed": 5}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": MESSAGES, "stop": ["\n3."]}),
        (CHAT, {"messages": MESSAGES, "stop": ["the"], "include_stop_str_in_output": True}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 90}),
        (CHAT, {"messages": MESSAGES, "apar": {"stream": "threads", "max_threads": 2}}),
        (CHAT, {"messages": MESSAGES, "apar": {"stream": "threads", "enabled": False}}),
        (
            CHAT,
            {
                "messages": MESSAGES,
                "max_tokens": 40,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
                    },
                },
            },
        ),
        (CHAT, {"messages": MESSAGES, "stream_options": {"continuous_usage_stats": True}}),
        (COMPLETION, {"prompt": PROMPT, "max_tokens": 100, "temperature": 1.5, "seed": 3}),
        (COMPLETION, {"prompt": [PROMPT, "1. One"], "max_tokens": 60, "n": 2, "temperature": 1.0}),
        (COMPLETION, {"prompt": PROMPT, "max_tokens": 60, "logprobs": 1}),
    ],
)
def test_every_request_can_be_rebuilt_from_its_tags(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    reader, texts = read(chunks(server, path, body))

    assert {choice: reader.text(choice) for choice in reader.threads} == texts
    assert all(
        thread["state"] == "ended"
        for threads in reader.threads.values()
        for thread in threads.values()
    )


@pytest.mark.slow
def test_an_echoed_prompt_belongs_to_no_thread(server: Server) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 40}

    reader, texts = read(chunks(server, COMPLETION, body))

    assert texts[0] == PROMPT + reader.text()


def test_the_example_of_the_page_runs(server: Server) -> None:
    example = code_blocks()[0]
    assert len(example.splitlines()) <= 20
    own = example.replace("http://127.0.0.1:8000", server.url).replace('"none"', repr(TOKEN))
    printed = io.StringIO()

    with slowed(server.processes(ENGINE)), contextlib.redirect_stdout(printed):
        exec(compile(own, "docs/streams.md", "exec"), {})

    # At least one moment at which three threads wrote.
    assert re.search(r"ms .*root.*root\.\d.*root\.\d", printed.getvalue())


@pytest.mark.slow
def test_a_client_that_leaves_ends_all_threads(server: Server) -> None:
    body = BODY | {"messages": MESSAGES, "max_tokens": 2000, "temperature": 1.2}
    with httpx.stream(
        "POST", server.url + CHAT, json=body, headers=authorization(), timeout=120
    ) as response:
        lines = response.iter_lines()
        while '"root.1"' not in next(lines):
            pass

    server.wait_until_idle()
