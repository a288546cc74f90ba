"""The Responses API and Anthropic's Messages API, through the clients that people use."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from cluster.local_ray import free_port
from tests.fakes.quick_start import program
from tests.fakes.tagged_streams import TaggedReader
from tests.fakes.waiting import wait_until
from tests.integration.serving.apar_process import (
    ENGINE,
    REQUEST_S,
    TOKEN,
    Server,
    authorization,
    slowed,
)
from tests.integration.serving.killed_streams import Victims
from tests.integration.serving.shared_server import wait_for_a_new_minute

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MODEL = "apar-tiny"
PROMPT = "Give me 3 tips for sleeping well."
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CLIENTS_PYTHON = "APAR_TEST_CLIENTS_PYTHON"
"""Interpreter with the packages of requirements/clients.in; `.ci/test-clients` sets it."""
SPELLED = "[Fork][Child]"


def claude(server: Server, token: str = TOKEN) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=token, max_retries=0)


def chat(server: Server, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0} | fields
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked(path: str, **fields: Any) -> dict[str, Any]:
    """Return the body of the usual question."""
    if path == RESPONSES:
        return {"model": MODEL, "input": PROMPT, "temperature": 0} | fields
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
    return body | {"temperature": 0, "max_tokens": 400} | fields


def by_claude(**fields: Any) -> dict[str, Any]:
    """Return the usual question for Anthropic's client, which has no `temperature` any more."""
    named = ("model", "messages", "max_tokens", "stop_sequences")
    body = asked(MESSAGES, **fields)
    extra = {name: body.pop(name) for name in list(body) if name not in named}
    return body | {"extra_body": extra}


def ask(server: Server, path: str, **fields: Any) -> Any:
    answer = server.post(path, json=asked(path, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(path: str, answer: Any) -> str:
    parts = answer["output"][0]["content"] if path == RESPONSES else answer["content"]
    return "".join(part["text"] for part in parts)


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert event["type"] == name
            yield event


def delta_of(event: dict[str, Any]) -> str:
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


def last_apar(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the statistics at the end of a stream."""
    found = events[-1]["response"]["apar"] if path == RESPONSES else events[-2]["apar"]
    return {name: found[name] for name in found if name not in ("time_ms", "updates")}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_each_api_answers_as_a_chat_does(server: Server, path: str) -> None:
    expected = chat(server)

    whole = ask(server, path)
    streamed = server.post(path, json=asked(path, stream=True))
    events = list(events_of(iter(streamed.text.splitlines())))

    text = expected["choices"][0]["message"]["content"]
    assert text_of(path, whole) == text
    assert "".join(map(delta_of, events)) == text
    assert whole["apar"]["forks"] == 3
    assert whole["apar"] == expected["apar"] == last_apar(path, events)
    assert whole["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert whole["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
    record = server.record(streamed.headers["x-request-id"])
    assert (record["path"], record["threads"], record["stream"]) == (path, 4, True)
    assert record["prompt_tokens"] == whole["usage"]["input_tokens"]
    assert ask(server, path, apar={"enabled": False})["apar"]["threads"] == 1
    server.wait_until_idle()


def test_openais_client_creates_and_streams_responses(server: Server) -> None:
    client = server.openai()

    whole = client.responses.create(**asked(RESPONSES))
    with client.responses.stream(**asked(RESPONSES)) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()

    assert whole.output_text.startswith("Here are 3 tips")
    assert "".join(deltas) == final.output_text == whole.output_text
    assert (final.status, final.error) == ("completed", None)
    assert (final.model_extra or {})["apar"] == (whole.model_extra or {})["apar"]
    short = client.responses.create(**asked(RESPONSES), max_output_tokens=5)
    assert (short.status, short.usage and short.usage.output_tokens) == ("incomplete", 5)
    cut = client.responses.create(**asked(RESPONSES), extra_body={"stop": ["2."]})
    assert cut.output_text == whole.output_text.partition("2.")[0]
    with pytest.raises(openai.BadRequestError, match="responses are not stored"):
        client.responses.create(**asked(RESPONSES), store=True)
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.retrieve(whole.id)
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        client.responses.cancel(whole.id)


def test_output_that_a_client_sends_back_is_a_turn_of_the_conversation(server: Server) -> None:
    client = server.openai()
    last: Any = {"role": "user", "content": "Thanks. Give me 2 tips for learning guitar."}

    first = client.responses.create(**asked(RESPONSES))
    turns: list[Any] = [{"role": "user", "content": PROMPT}, *first.output, last]
    dumped = [*turns[:1], *(item.model_dump() for item in first.output), last]
    found = [client.responses.create(**asked(RESPONSES, input=each)) for each in (turns, dumped)]

    answer = {"role": "assistant", "content": first.output_text}
    expected = chat(server, messages=[turns[0], answer, last])
    for each in found:
        assert each.output_text == expected["choices"][0]["message"]["content"]
        assert each.usage is not None
        assert each.usage.input_tokens == expected["usage"]["prompt_tokens"]


def test_anthropics_client_creates_streams_and_counts_messages(server: Server) -> None:
    client = claude(server)

    whole = client.messages.create(**by_claude())
    with client.messages.stream(**by_claude()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    counted = client.messages.count_tokens(model=MODEL, messages=asked(MESSAGES)["messages"])

    assert whole.content[0].type == "text"
    assert text == whole.content[0].text == chat(server)["choices"][0]["message"]["content"]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert counted.input_tokens == whole.usage.input_tokens
    assert whole._request_id is not None
    cut = client.messages.create(**by_claude(stop_sequences=["2."]))
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "2.")
    assert client.messages.create(**by_claude(max_tokens=3)).stop_reason == "max_tokens"
    with pytest.raises(anthropic.BadRequestError, match=r"apar\.max_threads"):
        client.messages.create(**by_claude(apar={"max_threads": 0}))
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**by_claude(model="none"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.AuthenticationError):
        claude(server, "wrong").messages.create(**by_claude())


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_rates_and_limits_of_a_key_hold_in_each_api(server: Server, path: str) -> None:
    long = server.post(path, token="short", json=asked(path))
    wait_for_a_new_minute()
    many = [server.post(path, token="once", json=asked(path)) for _ in range(2)]

    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    # Another test may have used the key.
    assert many[-1].status_code == 429
    assert int(many[-1].headers["retry-after"]) > 0
    if path == MESSAGES:
        assert many[-1].json()["error"]["type"] == "rate_limit_error"


def items(text: str) -> dict[str, Any]:
    """Return inputs of every shape that the model's template knows, with one text each."""
    return {
        "string": {"input": text},
        "message": {"input": [{"role": "user", "content": text}]},
        "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}]},
        "assistant": {
            "input": [
                {"role": "user", "content": "Hi"},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": text}],
                },
                {"role": "user", "content": "Go on"},
            ]
        },
        "instructions": {"input": "Hi", "instructions": text},
    }


def blocks(text: str) -> dict[str, Any]:
    """Return messages of every shape that the model's template knows, with one text each."""
    return {
        "string": {"messages": [{"role": "user", "content": text}]},
        "block": {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        "system": {"system": text, "messages": [{"role": "user", "content": "Hi"}]},
        "assistant": {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": text},
                {"role": "user", "content": "Go on"},
            ]
        },
    }


@pytest.mark.parametrize(("path", "shapes"), [(RESPONSES, items), (MESSAGES, blocks)])
def test_the_fork_token_spelled_in_any_shape_of_a_prompt_is_plain_text(
    server: Server, path: str, shapes: Any
) -> None:
    for name in shapes(""):
        lengths = {}
        for text in ("x", SPELLED):
            answer = ask(server, path, **shapes(text)[name], max_output_tokens=2, max_tokens=2)
            lengths[text] = answer["usage"]["input_tokens"]
        # As control tokens, they would be two.
        assert lengths[SPELLED] - lengths["x"] > 4, (name, lengths)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_tagged_stream_of_each_api_can_be_rebuilt(server: Server, path: str) -> None:
    body = asked(path, stream=True, apar={"stream": "threads"})

    answer = server.post(path, json=body)

    reader, text, numbers = TaggedReader(), "", []
    for event in events_of(iter(answer.text.splitlines())):
        text += delta_of(event)
        numbers.append(event.get("sequence_number"))
        if "updates" in event.get("apar", {}):
            reader.read({name: event["apar"][name] for name in ("time_ms", "updates")})
    assert text == reader.text() == text_of(path, ask(server, path))
    assert len(reader.threads[0]) == 4
    assert path == MESSAGES or numbers == list(range(len(numbers)))


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_client_that_leaves_a_stream_leaves_nothing_behind(server: Server, path: str) -> None:
    body = asked(path, stream=True, apar={"enabled": False})
    with httpx.stream(
        "POST", server.url + path, json=body, headers=authorization(), timeout=60
    ) as answer:
        for event in events_of(answer.iter_lines()):
            if delta_of(event):
                break

    server.wait_until_idle()


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_stream_whose_replica_is_killed_continues(
    replicated: Server, path: str, tagged: bool
) -> None:
    fields: dict[str, Any] = {"apar": {"stream": "threads"}} if tagged else {}
    whole = ask(replicated, path)

    victims, events, reader = Victims(replicated), [], TaggedReader()
    num_deltas = 0
    with (
        slowed(replicated.processes(ENGINE)),
        httpx.stream(
            "POST",
            replicated.url + path,
            json=asked(path, stream=True, **fields),
            headers=authorization(),
            timeout=300,
        ) as answer,
    ):
        for event in events_of(answer.iter_lines()):
            events.append(event)
            if "updates" in event.get("apar", {}):
                reader.read({name: event["apar"][name] for name in ("time_ms", "updates")})
            num_deltas += bool(delta_of(event))
            if num_deltas == 5 and delta_of(event):
                victims.kill(replica=True)

    assert replicated.record(answer.headers["x-request-id"])["continued"] >= 1
    assert "".join(map(delta_of, events)) == text_of(path, whole)
    assert last_apar(path, events) == whole["apar"]
    if tagged:
        assert reader.text() == text_of(path, whole)
    if path == RESPONSES:
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert len({each["item_id"] for each in events if "item_id" in each}) == 1
        assert text_of(path, events[-1]["response"]) == text_of(path, whole)


@pytest.mark.parametrize("first_line", ["from langchain_openai", "import litellm"])
def test_a_snippet_of_the_clients_page_prints_an_answer(server: Server, first_line: str) -> None:
    python = os.environ.get(CLIENTS_PYTHON)
    if python is None:
        pytest.skip("run it by .ci/test-clients, which installs the clients")
    snippet = program(first_line, ("docs/apis.md",)).replace('"none"', f'"{TOKEN}"')

    done = subprocess.run(
        [python, "-c", snippet.replace("http://127.0.0.1:8000", server.url)],
        capture_output=True,
        text=True,
        timeout=REQUEST_S,
        check=False,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


def test_a_client_reads_and_continues_responses_stored_by_agentic_api(
    server: Server, tmp_path: Path
) -> None:
    python = os.environ.get(CLIENTS_PYTHON)
    if python is None:
        pytest.skip("run it by .ci/test-clients, which installs the clients")
    port = free_port()
    command = ["serve", "--vllm-base-url", server.url, "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {
        "OPENAI_API_KEY": TOKEN,
        "DATABASE_URL": f"sqlite://{tmp_path}/responses.db",
    }
    process = subprocess.Popen([python, "-m", "agentic_api", *command], env=environment)
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}/health"))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN, max_retries=0)
        first = client.responses.create(model=MODEL, input=PROMPT, temperature=0)
        second = client.responses.create(
            model=MODEL, input="And 3 more.", previous_response_id=first.id, temperature=0
        )
        kept = client.responses.retrieve(first.id)
        with client.responses.stream(model=MODEL, input=PROMPT, temperature=0) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    finally:
        process.terminate()
        process.wait()

    text = chat(server)["choices"][0]["message"]["content"]
    assert first.output_text == kept.output_text == "".join(deltas) == text
    assert first.usage is not None
    assert second.usage is not None
    turn = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens > turn - 20, "the first question and its answer are in it"


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_other_clients_work_unmodified(server: Server) -> None:
    python = os.environ.get(CLIENTS_PYTHON)
    if python is None:
        pytest.skip("run it by .ci/test-clients, which installs the clients")
    program = Path(__file__).with_name("api_clients.py")

    done = subprocess.run(
        [python, program, server.url],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # Without it, LiteLLM asks GitHub for prices.
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 11
    expected = chat(server)
    for name, received in found.items():
        assert received["streamed"] == received["whole"], name
        if "completion" not in name:
            assert received["whole"] == expected["choices"][0]["message"]["content"], name
            assert received["tokens"] == expected["usage"]["completion_tokens"], name
            assert received["pieces"] > 5, name
