"""A vLLM server with our plugin answers ordinary requests as one without it, byte by byte.

By default both run in this environment, and `VLLM_PLUGINS` keeps the plugin out of one.
`.ci/test-existing-vllm` names two environments instead: one without this package, and one in which
`pip install .` has added it to vLLM.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from apar_core.engine.async_engine import SCHEDULER_CLS
from apar_core.models.apar_tiny import checkpoint_path
from tests.integration.vllm_server import vllm_server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]

MOST_STREAMS = 30
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
QUESTION = [{"role": "user", "content": "Give me 4 tips for learning guitar."}]
TURNS = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello, what can I do?"},
    {"role": "user", "content": "What does [Fork] mean? Grüße, 世界 \N{SPOON}"},
]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
GREEDY: dict[str, Any] = {"temperature": 0}


@dataclass(frozen=True, slots=True)
class Request:
    """A POST of `body`, with the model and a greedy short answer where it says nothing else.

    A body of bytes is sent as it is; None makes it a GET.
    """

    path: str
    body: dict[str, Any] | bytes | None = None
    status: int = 200

    def content(self) -> bytes | None:
        if not isinstance(self.body, dict):
            return self.body
        body: dict[str, Any] = {"model": "tiny"} | self.body
        if self.path in (CHAT, COMPLETIONS):
            body = {"max_tokens": 40} | GREEDY | body
        if self.path == CHAT:
            body = {"messages": QUESTION} | body
        return json.dumps(body).encode()


def chat(status: int = 200, **fields: Any) -> Request:
    return Request(CHAT, fields, status)


def text(prompt: object, status: int = 200, **fields: Any) -> Request:
    return Request(COMPLETIONS, {"prompt": prompt} | fields, status)


REQUESTS = {
    "greedy": chat(),
    "long": chat(max_tokens=200),
    "turns": chat(messages=TURNS),
    "seed, several choices": chat(temperature=0.9, top_p=0.8, seed=3, n=3),
    "seed, top k, min p": chat(temperature=1.2, top_k=9, min_p=0.02, seed=8),
    "stream": chat(**USAGE),
    "stream, usage in every chunk": chat(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "stream, several choices": chat(temperature=0.9, seed=3, n=2, **USAGE),
    "stream, log-probabilities": chat(logprobs=True, top_logprobs=2, **USAGE),
    "stream, stop": chat(stop=["\n"], **USAGE),
    "stream, tools": chat(tools=[TOOL], **USAGE),
    "stream, forced tool": chat(tools=[TOOL], tool_choice="required", **USAGE),
    "stream, json": chat(response_format=JSON_SCHEMA, **USAGE),
    "log-probabilities": chat(logprobs=True, top_logprobs=4),
    "token ids in the answer": chat(return_token_ids=True),
    "tools": chat(tools=[TOOL]),
    "tools, none": chat(tools=[TOOL], tool_choice="none"),
    "forced tool": chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}
    ),
    "stop": chat(stop=["\n"]),
    "stop, in the answer": chat(stop=["\n"], include_stop_str_in_output=True),
    "stop token": chat(stop_token_ids=[20, 30, 40]),
    "json": chat(response_format=JSON_SCHEMA),
    "json object": chat(response_format={"type": "json_object"}),
    "choice": chat(structured_outputs={"choice": ["yes", "no"]}),
    "regex": chat(structured_outputs={"regex": "[ab]{1,8}"}),
    "penalties": chat(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "at least": chat(min_tokens=20),
    "to the end": chat(ignore_eos=True, max_tokens=60),
    "bias": chat(logit_bias={"50": 5, "60": -5}),
    "bad words": chat(bad_words=["the", "a"]),
    "allowed tokens": chat(allowed_token_ids=list(range(20, 200))),
    "special tokens in the answer": chat(skip_special_tokens=False, max_tokens=80),
    "extra arguments": chat(vllm_xargs={"apar_enabled": 1, "other": 2}),
    "priority": chat(priority=3),
    "priority below zero": chat(priority=-3),
    "cache salt": chat(cache_salt="salt"),
    "continued": chat(
        messages=[*QUESTION, {"role": "assistant", "content": "1. "}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "text": text("[Fork] The", echo=True, logprobs=2),
    "texts": text(["The", "Once upon a time"], n=2, temperature=0.7, seed=1),
    "text, stream": text("The best way to learn", **USAGE),
    "text, stream of several": text(["The", "Tips:"], **USAGE),
    "text, suffix of nothing": text("1. ", max_tokens=1),
    "token ids": text([5, 6, 7], prompt_logprobs=1),
    "beams": text("The", use_beam_search=True, n=2, max_tokens=8),
    "response": Request(RESPONSES, {"input": "Give me 3 tips.", "max_output_tokens": 30, **GREEDY}),
    "tokenize": Request("/tokenize", {"messages": QUESTION}),
    "detokenize": Request("/detokenize", {"tokens": [50, 60, 70]}),
    "models": Request("/v1/models"),
    "version": Request("/version"),
    "health": Request("/health"),
    "bad temperature": chat(400, temperature=-1),
    "bad bias": chat(400, logit_bias={"9999999": 1}),
    "bad type": chat(400, max_tokens="many"),
    "bad schema": chat(400, structured_outputs={"regex": "("}),
    "no messages": chat(400, messages=[]),
    "too many choices": chat(400, n=3),
    "too long": text([5] * 800, 400),
    "no such token": text([999999], 400),
    "stream, too long": text([5] * 800, 400, stream=True),
    "no JSON": Request(CHAT, b'{"model": "tiny", ', 400),
    "other model": chat(404, model="other"),
    "embeddings": Request("/v1/embeddings", {"input": "text"}, 404),
    "no such route": Request("/v1/nothing", None, 404),
    "wrong method": Request(CHAT, None, 405),
}
# All that differs between two runs of one server: times and random ids.
DIFFERS: Iterable[tuple[bytes, bytes]] = [
    (rb'"(created|created_at)":\d+', rb'"\1":0'),
    (rb"(chatcmpl-tool-|modelperm-|resp_|msg_|rs_)[0-9a-f]{8,}", rb"\g<1>0"),
]


def answers(address: str) -> dict[str, bytes]:
    """Return status, headers and body of each answer.

    The body of a stream has all its chunks, those of each choice together.
    """
    with httpx.Client(base_url=address, timeout=300) as client:
        return {
            name: all_chunks(client, request, f"request-{number}")
            for number, (name, request) in enumerate(REQUESTS.items())
        }


def all_chunks(client: httpx.Client, request: Request, request_id: str) -> bytes:
    """Return a whole answer, or a stream with a chunk for each step.

    vLLM puts the tokens of several steps into one chunk when its API process is late. So a stream
    is read until the one with the most chunks has come twice.
    """
    best = answer_of(client, request, request_id)
    is_stream = b"content-type: text/event-stream" in best
    for _ in range(MOST_STREAMS if is_stream else 0):
        again = answer_of(client, request, request_id)
        if again == best:
            break
        best = max(best, again, key=lambda answer: answer.count(b"\ndata: "))
    return best


def answer_of(client: httpx.Client, request: Request, request_id: str) -> bytes:
    """Return status, headers and body of one answer, without times and random ids."""
    answer = client.request(
        "GET" if request.body is None else "POST",
        request.path,
        content=request.content(),
        headers={"X-Request-Id": request_id, "Content-Type": "application/json"},
    )
    headers = sorted(f"{key}: {value}" for key, value in answer.headers.items() if key != "date")
    body = answer.content
    for pattern, constant in DIFFERS:
        body = re.sub(pattern, constant, body)
    if "text/event-stream" in answer.headers.get("content-type", ""):
        body = by_choice(body)
    return "\n".join([str(answer.status_code), *headers, "", ""]).encode() + body


def by_choice(stream: bytes) -> bytes:
    """Return the events of a stream, those of each choice together, in their own order.

    Which choice's chunk comes first in a step differs between two runs of one server.
    """

    def choice(event: bytes) -> tuple[int, int]:
        kind = event.startswith(b"data: {")
        choices = json.loads(event.removeprefix(b"data: ")).get("choices") if kind else None
        return (0, choices[0]["index"]) if choices else (1, 0)

    events = sorted(stream.rstrip(b"\n").split(b"\n\n"), key=choice)
    return b"\n\n".join(events) + b"\n\n"


def equal(one: dict[str, bytes], other: dict[str, bytes], label: str) -> None:
    """Compare all answers; `APAR_ANSWERS` names a folder for a table of both."""
    if folder := os.environ.get("APAR_ANSWERS"):
        rows = [
            f"{name:<32} {one[name][:3].decode()} {len(one[name]):>6} bytes  "
            + "  ".join(sha256(each[name]).hexdigest()[:16] for each in (one, other))
            for name in REQUESTS
        ]
        head = f"{len(rows)} answers, {sum(one[name] == other[name] for name in one)} are equal"
        (Path(folder) / f"{label}.txt").write_text("\n".join([head, *rows, ""]))
    assert {name: int(answer[:3]) for name, answer in one.items()} == {
        name: request.status for name, request in REQUESTS.items()
    }
    assert other == one


@contextmanager
def without_plugin(log: Path, **options: Any) -> Iterator[str]:
    """A server whose vLLM does not load the plugin, or lies in an environment that lacks it."""
    if python := os.environ.get("APAR_PLAIN_PYTHON"):
        options["python"] = python
    else:
        options["VLLM_PLUGINS"] = ""  # an empty list
    with vllm_server(log, **options) as address:
        yield address


@contextmanager
def with_plugin(log: Path, *arguments: str, **options: Any) -> Iterator[str]:
    options["python"] = os.environ.get("APAR_PLUGIN_PYTHON")
    with vllm_server(log, *arguments, **options, VLLM_LOGGING_LEVEL="DEBUG") as address:
        yield address
    said = log.read_text(errors="replace")
    assert "- apar -> apar_core.engine.plugin:register" in said
    assert "Failed to load plugin" not in said


@pytest.fixture(scope="module")
def ordinary_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with other names for its control tokens, so that they are none."""
    folder = shutil.copytree(checkpoint_path(), tmp_path_factory.mktemp("ordinary") / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        words = file.read_text().replace("[Fork]", "<|one|>").replace("[Child]", "<|two|>")
        file.write_text(words)
    return folder


def test_an_engine_without_our_scheduler_answers_as_without_the_plugin(tmp_path: Path) -> None:
    with without_plugin(tmp_path / "without") as address:
        plain = answers(address)
        equal(plain, answers(address), "without-the-plugin-twice")
    with with_plugin(tmp_path / "with") as address:
        ours = answers(address)

    # Nothing of ours says anything, or is imported, beside the plugin's own entry point.
    said = (tmp_path / "with").read_text(errors="replace")
    known = r"apar_core\.engine\.plugin:register|apar_core/models"
    assert "apar_core" not in re.sub(known, "", said)
    equal(plain, ours, "without-our-scheduler")


def test_our_scheduler_answers_for_an_ordinary_checkpoint_as_without_the_plugin(
    tmp_path: Path, ordinary_checkpoint: Path
) -> None:
    with without_plugin(tmp_path / "without", checkpoint=ordinary_checkpoint) as address:
        plain = answers(address)
    with with_plugin(
        tmp_path / "with", "--scheduler-cls", SCHEDULER_CLS, checkpoint=ordinary_checkpoint
    ) as address:
        ours = answers(address)

    assert "checkpoint has no control tokens" in (tmp_path / "with").read_text(errors="replace")
    equal(plain, ours, "our-scheduler-ordinary-checkpoint")


def test_our_scheduler_forks_for_an_apar_checkpoint(tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 400}
    with with_plugin(tmp_path / "with", "--scheduler-cls", SCHEDULER_CLS) as address:
        steps: list[int] = []
        tokens: list[int] = []
        for enabled in (0, 1):
            before = num_steps(address)
            asked = body | {"vllm_xargs": {"apar_enabled": enabled}}
            answer = httpx.post(address + CHAT, json=asked, timeout=300).json()
            steps.append(num_steps(address) - before)
            tokens.append(answer["usage"]["completion_tokens"])
            assert "[Fork]" not in answer["choices"][0]["message"]["content"]

    # One token a step without forks; the threads of the forked answer share steps.
    assert steps[0] == tokens[0]
    assert steps[1] < 0.8 * tokens[1]


def num_steps(address: str) -> int:
    page = httpx.get(address + "/metrics", timeout=30).text
    counts = re.findall(r"^vllm:iteration_tokens_total_count\{.*\} (\S+)$", page, re.MULTILINE)
    return int(sum(map(float, counts)))
