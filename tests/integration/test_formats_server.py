"""A format that the configuration defines, behind vLLM's own server with our plugin."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from apar_core.engine.async_engine import SCHEDULER_CLS
from tests.integration.random_checkpoint import write_checkpoint
from tests.integration.vllm_server import vllm_server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Joins what a client sends without a border, so that a marker may be split over messages.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
FORMAT = {
    "name": "mine",
    "trigger": "<Go>",
    "child_seed": "<Part>\n",
    "parent": "continues",
    "replacement": "[part]",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("server")
    (folder / "template").write_text(TEMPLATE)
    checkpoint = write_checkpoint(folder / "model", ("<Go>", "<Part>"), {"<Go>": 4.0})
    arguments = ["--scheduler-cls", SCHEDULER_CLS, "--max-model-len", "256"]
    arguments += ["--additional-config", json.dumps({"apar": {"parallel_format": FORMAT}})]
    arguments += ["--chat-template", str(folder / "template")]
    with vllm_server(folder / "log", *arguments, checkpoint=checkpoint) as address:
        yield address


def post(url: str, path: str, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 60, "skip_special_tokens": False}
    return httpx.post(url + path, json=body | fields, timeout=120)


def test_threads_stand_behind_the_text_that_replaces_the_trigger(url: str) -> None:
    answers = [
        post(url, "/v1/completions", prompt=f"Part {number}").json()["choices"][0]["text"]
        for number in range(8)
    ]

    assert any("[part]" in text for text in answers)
    assert not any("<Go>" in text or "<Part>" in text for text in answers)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_marks_in_prompts_are_read_character_by_character(url: str, path: str) -> None:
    texts = ["a <Go>", "<P", "art><Go", "> <Part>"]
    roles = ["system", "user", "assistant", "tool"]
    fields: dict[str, object] = {"prompt": "".join(texts)}
    if "chat" in path:
        fields = {
            "messages": [
                {"role": role, "content": text, "tool_call_id": "1"}
                for role, text in zip(roles, texts, strict=True)
            ]
        }

    answer = post(url, path, **fields)

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len("".join(texts))


def test_marks_as_token_ids_are_refused(url: str) -> None:
    tokens = httpx.post(
        f"{url}/tokenize",
        json={"model": "tiny", "prompt": "<Part>", "add_special_tokens": False},
        timeout=60,
    ).json()["tokens"]
    assert len(tokens) == 1

    answer = post(url, "/v1/completions", prompt=[5, *tokens])

    assert answer.status_code == 400
    assert "'<Part>'" in answer.text
