"""Answers that may call tools fork until the call, which vLLM's parser finds in the text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.models.apar_tiny import checkpoint_path
from tests.integration.serving.apar_process import TINY, TOKEN, Server, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUESTION = "Give me 5 tips for learning guitar."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
TEXT = "Rain is likely. It falls at night. I look it up."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with two more tokens: those of Hermes' tool calls."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    engine = TINY["engine"] | {"tool_call_parser": "hermes"}
    model = TINY | {"checkpoint": str(checkpoint), "name": "m", "replay": True, "engine": engine}
    with serving(tmp_path_factory.mktemp("server"), model) as server:
        yield server


@pytest.fixture(scope="module")
def replay(checkpoint: Path) -> dict[str, Any]:
    """An answer with a detail in a child, and a tool call at its end."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    root = "Rain is likely.[Fork] I look it up.<tool_call>" + CALL + "</tool_call><eos>"
    return {"replay": {"": ids(root), "0": ids(" It falls at night.<eos>")}}


def test_a_call_after_a_fork_is_found(server: Server, replay: dict[str, Any]) -> None:
    answer = server.openai().chat.completions.create(
        model="m", messages=MESSAGES, tools=[TOOL], extra_body={"apar": replay}
    )

    [choice] = answer.choices
    assert choice.message.content == TEXT
    calls = choice.message.tool_calls or []
    assert len(calls) == 1
    call = calls[0]
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert choice.finish_reason == "tool_calls"
    assert (answer.model_extra or {})["apar"]["threads"] == 2


def test_a_streamed_call_after_a_fork_is_found(server: Server, replay: dict[str, Any]) -> None:
    chunks = list(
        server.openai().chat.completions.create(
            model="m",
            messages=MESSAGES,
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"apar": replay},
        )
    )

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert "".join((call.function and call.function.name) or "" for call in calls) == "weather"
    arguments = "".join((call.function and call.function.arguments) or "" for call in calls)
    assert json.loads(arguments) == {"city": "Rome"}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert (chunks[-1].model_extra or {})["apar"]["threads"] == 2


def test_the_other_apis_find_it_too(server: Server, replay: dict[str, Any]) -> None:
    response = server.openai().responses.create(
        model="m",
        input=QUESTION,
        store=False,
        tools=[{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}],
        extra_body={"apar": replay},
    )
    message = anthropic.Anthropic(base_url=server.url, api_key=TOKEN).messages.create(
        model="m",
        max_tokens=100,
        messages=MESSAGES,
        tools=[{"name": "weather", "input_schema": PARAMETERS}],
        extra_body={"apar": replay},
    )

    [call] = [item for item in response.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert response.output_text == TEXT
    [use] = [block for block in message.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("weather", {"city": "Rome"})
    assert [block.text for block in message.content if block.type == "text"] == [TEXT]


def test_an_answer_without_a_call_is_that_without_tools(server: Server) -> None:
    client = server.openai()

    def ask(**fields: Any) -> tuple[str | None, int]:
        answer: Any = client.chat.completions.create(
            model="m", messages=MESSAGES, temperature=0, max_tokens=200, **fields
        )
        return answer.choices[0].message.content, answer.model_extra["apar"]["forks"]

    text, forks = ask()

    assert forks >= 3
    assert ask(tools=[TOOL]) == (text, forks)
