"""vLLM's own server with our plugin, without a gateway."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from apar_core.engine.async_engine import SCHEDULER_CLS
from tests.integration.vllm_server import vllm_server

pytestmark = [pytest.mark.engine, pytest.mark.ci]

CHAT = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {
    "type": "object",
    "properties": {"tips": {"type": "array", "items": {"enum": ["rest", "food"]}, "maxItems": 3}},
    "required": ["tips"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "tips", "schema": SCHEMA}}
# The small model could write white space for ever.
STRUCTURED_OUTPUTS = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ["--scheduler-cls", SCHEDULER_CLS, "--structured-outputs-config"]
    with vllm_server(log, *arguments, STRUCTURED_OUTPUTS) as address:
        yield address


def ask(url: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Give me 5 tips for sleeping well."}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 120}
    return httpx.post(url + CHAT, json=body | fields, timeout=120)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apar_priority", -5),
        ("apar_key", "alice"),
        ("apar_key_max_threads", 999),
        ("apar", "x"),
        ("apar_resume", "x"),
        ("apar_replay", "\n=5,6,7\n"),
    ],
)
def test_a_client_cannot_set_what_a_gateway_sets(url: str, name: str, value: object) -> None:
    answer = ask(url, vllm_xargs={name: value})

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == f"vllm_xargs.{name}"
    assert name in error["message"]


def test_a_chat_that_may_call_tools_does_not_fork(url: str) -> None:
    forked = text_of(ask(url))
    unforked = text_of(ask(url, vllm_xargs={"apar_enabled": 0}))
    assert forked != unforked

    may_call = text_of(ask(url, tools=[TOOL]))
    insisting = text_of(ask(url, tools=[TOOL], vllm_xargs={"apar_enabled": 1}))
    may_not_call = text_of(ask(url, tools=[TOOL], tool_choice="none"))

    assert may_call == insisting == unforked
    assert may_not_call == forked


def test_a_constrained_answer_beside_a_forked_one_is_that_without_forks(url: str) -> None:
    forked = text_of(ask(url))
    unforked = text_of(ask(url, response_format=RESPONSE_FORMAT, vllm_xargs={"apar_enabled": 0}))
    insisting = {"apar_enabled": 1}

    with ThreadPoolExecutor() as pool:
        free = pool.submit(ask, url)
        constrained = pool.submit(ask, url, response_format=RESPONSE_FORMAT, vllm_xargs=insisting)

    text = text_of(constrained.result())
    assert set(json.loads(text)["tips"]) <= {"rest", "food"}
    assert text == unforked
    assert text_of(free.result()) == forked
