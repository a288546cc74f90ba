"""vLLM's own server with our plugin, without a gateway."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
MIDDLEWARE = "deployments.vllm_server.AparField"
STRUCTURED_OUTPUTS = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def url(log: Path) -> Iterator[str]:
    arguments = ["--scheduler-cls", SCHEDULER_CLS, "--middleware", MIDDLEWARE]
    arguments += ["--structured-outputs-config", STRUCTURED_OUTPUTS]
    # Commands that were tested in this process before have set it for themselves.
    with vllm_server(log, *arguments, VLLM_LOGGING_LEVEL="INFO") as address:
        yield address


def ask(url: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Give me 5 tips for sleeping well."}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 120}
    return httpx.post(url + CHAT, json=body | fields, timeout=120)


def numbers(url: str) -> dict[str, float]:
    """Return the series of our metrics, without times of creation and busy time."""
    page = httpx.get(url + "/metrics", timeout=60).text
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("apar_")]
    return {name: float(value) for name, _, value in lines if "_created" not in name}


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


def test_the_page_of_metrics_counts_forks_as_the_answer_does(url: str) -> None:
    before = numbers(url)

    answer = ask(url, apar={}).json()
    unforked = ask(url, apar={"enabled": False}).json()

    counts, plain = answer["apar"], unforked["apar"]
    assert counts["forks"] > 1
    assert (plain["threads"], plain["forks"]) == (1, 0)
    after = numbers(url)
    new = {name: after[name] - before.get(name, 0.0) for name in after}
    engine, model = 'engine="0",model="tiny"', 'model="tiny"'
    assert new[f'apar_forks_total{{{engine},outcome="accepted"}}'] == counts["forks"]
    assert new[f"apar_request_threads_count{{{model}}}"] == 2
    assert new[f'apar_request_threads_bucket{{le="1.0",{model}}}'] == 1
    both = counts["decode_steps"] + plain["decode_steps"]
    assert new[f"apar_critical_path_steps_total{{{model}}}"] == both
    assert new[f"apar_engine_steps_total{{{engine}}}"] == both
    assert 0 < new[f"apar_child_tokens_total{{{engine}}}"] < answer["usage"]["completion_tokens"]
    # Nothing runs any more.
    for state in ("running", "waiting"):
        assert after[f'apar_engine_requests{{{engine},state="{state}"}}'] == 0
        assert after[f'apar_threads{{{engine},state="{state}"}}'] == 0
    free, all_blocks = (after[f"apar_kv_{name}{{{engine}}}"] for name in ("free_blocks", "blocks"))
    assert free == all_blocks > 0


def test_an_answer_has_the_object_only_on_request(url: str) -> None:
    plain, asked = ask(url), ask(url, apar={})

    assert "apar" not in plain.json()
    assert text_of(plain) == text_of(asked)
    assert plain.json()["usage"] == asked.json()["usage"]


def test_a_stream_has_the_object_beside_its_usage(url: str) -> None:
    whole = ask(url, apar={}).json()

    answer = ask(url, apar={}, stream=True, stream_options={"include_usage": True})

    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    assert [chunk["apar"] for chunk in chunks if "apar" in chunk] == [whole["apar"]]
    pieces = [each["delta"].get("content") or "" for chunk in chunks for each in chunk["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


def test_a_tagged_stream_names_every_thread(url: str) -> None:
    answer = ask(
        url, apar={"stream": "threads"}, stream=True, stream_options={"include_usage": True}
    )

    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    updates = [each for chunk in chunks for each in chunk.get("apar", {}).get("updates", ())]
    (num_threads,) = (
        chunk["apar"]["threads"] for chunk in chunks if "threads" in chunk.get("apar", {})
    )
    assert len({update["id"] for update in updates}) == num_threads > 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Give me 3 tips for sleeping well.", "max_tokens": 40}),
        ("/v1/responses", {"input": "Give me 3 tips for sleeping well.", "max_output_tokens": 40}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Give me 3 tips."}], "max_tokens": 40},
        ),
    ],
)
def test_each_api_has_the_object(url: str, path: str, fields: dict[str, Any]) -> None:
    answer = httpx.post(url + path, json={"model": "tiny", "apar": {}} | fields, timeout=120)

    assert answer.status_code == 200, answer.text
    assert answer.json()["apar"]["threads"] >= 1


def test_a_wrong_option_is_named(url: str) -> None:
    answer = ask(url, apar={"max_thread": 2})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "apar.max_thread"


def test_the_log_says_how_the_engine_forks(url: str, log: Path) -> None:
    said = log.read_text(errors="replace")

    assert said.count("forks: format apar; control tokens: '[Fork]' is 3") == 1
