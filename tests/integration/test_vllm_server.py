"""vLLM's own server with our plugin, without a gateway."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from apar_core.engine.async_engine import SCHEDULER_CLS
from apar_core.models.apar_tiny import checkpoint_path
from cluster.local_ray import free_port

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
START_S = 240.0
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += ["--model", str(checkpoint_path()), "--served-model-name", "tiny"]
    command += ["--scheduler-cls", SCHEDULER_CLS, "--enable-prefix-caching", "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "768", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                    break
            said = log.read_text(errors="replace")
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
