"""A vLLM server with our plugin answers ordinary requests as one without it, byte by byte."""

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.vllm_server import vllm_server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]

QUESTION = [{"role": "user", "content": "Give me 4 tips for learning guitar."}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"temperature": 0}),
    "seed": (CHAT, {"temperature": 0.9, "top_p": 0.8, "seed": 3, "n": 3}),
    "stream": (CHAT, {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}),
    "logprobs": (CHAT, {"temperature": 0, "logprobs": True, "top_logprobs": 4}),
    "tools": (CHAT, {"temperature": 0, "tools": [TOOL]}),
    "stop": (CHAT, {"temperature": 0, "stop": ["\n"]}),
    "json": (
        CHAT,
        {
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            },
        },
    ),
    "penalties": (CHAT, {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 20}),
    "extra arguments": (CHAT, {"temperature": 0, "vllm_xargs": {"apar_enabled": 1, "other": 2}}),
    "priority": (CHAT, {"temperature": 0, "priority": 3}),
    "text": (COMPLETIONS, {"prompt": "[Fork] The", "temperature": 0, "echo": True, "logprobs": 2}),
    "token ids": (COMPLETIONS, {"prompt": [5, 6, 7], "temperature": 0, "prompt_logprobs": 1}),
    "bad field": (CHAT, {"temperature": -1}),
    "bad bias": (CHAT, {"logit_bias": {"9999999": 1}}),
    "too long": (COMPLETIONS, {"prompt": [5] * 800}),
}


def answers(address: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for number, (name, (path, fields)) in enumerate(REQUESTS.items()):
        body = {"model": "tiny", "max_tokens": 40} | fields
        if path == CHAT:
            body["messages"] = QUESTION
        answer = httpx.post(
            address + path, json=body, headers={"X-Request-Id": f"request-{number}"}, timeout=300
        )
        # The time and the ids of tool calls are all that differs between two runs of one server.
        text = re.sub(rb'"created":\d+', b'"created":0', answer.content)
        text = re.sub(rb"chatcmpl-tool-[0-9a-f]+", b"chatcmpl-tool-0", text)
        found[name] = b"%d %s %s" % (
            answer.status_code,
            answer.headers["content-type"].encode(),
            text,
        )
    return found


def test_ordinary_requests_are_answered_byte_by_byte_as_without_the_plugin(tmp_path: Path) -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="apar")

    # An empty list loads no plugin.
    with vllm_server(tmp_path / "without", VLLM_PLUGINS="") as address:
        without = answers(address)
    with vllm_server(
        tmp_path / "with", VLLM_PLUGINS=plugin.name, VLLM_LOGGING_LEVEL="DEBUG"
    ) as address:
        with_plugin = answers(address)

    said = (tmp_path / "with").read_text(errors="replace")
    assert f"Loading plugin {plugin.name}" in said
    assert "Failed to load plugin" not in said
    assert "apar_core" not in re.sub(
        r"apar_core\.engine\.plugin:register|apar_core/models", "", said
    )
    assert {name: text[:3] for name, text in without.items() if text[:3] != b"200"} == {
        "bad field": b"400",
        "bad bias": b"400",
        "too long": b"400",
    }
    assert with_plugin == without
