"""The requests of the quick-start pages, sent as they are written to the shared server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.quick_start import blocks, commands, program
from tests.integration.serving.apar_process import REQUEST_S, TOKEN, Server

pytestmark = pytest.mark.cluster
ADDRESS = "http://127.0.0.1:8000"
REQUESTS = [line for line in commands() if line.startswith("curl ") and "apar-smollm2" in line]


def for_the_embedded_model(text: str) -> str:
    """A command or program with the model of the shared server, and a question that it knows."""
    question = "What are 5 ways to stay motivated while studying?"
    assert question in text
    known = text.replace(question, "Give me 5 tips for learning guitar.")
    return known.replace("apar-smollm2", "apar-tiny")


def assert_list(text: str) -> None:
    """Check that an answer is a list without control tokens."""
    assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) >= 2, text
    assert "[Fork]" not in text


def test_every_request_of_the_quick_start_is_sent() -> None:
    assert len(REQUESTS) >= 1
    assert all(ADDRESS in line for line in REQUESTS)


@pytest.mark.parametrize("line", REQUESTS)
def test_a_request_with_curl_is_answered(server: Server, line: str) -> None:
    command = f"{for_the_embedded_model(line)} -H 'Authorization: Bearer {TOKEN}'".replace(
        ADDRESS, server.url
    )

    answer = subprocess.run(
        command, shell=True, capture_output=True, timeout=REQUEST_S, check=True
    ).stdout

    body = json.loads(answer)
    assert_list(body["choices"][0]["message"]["content"])
    assert body["apar"]["forks"] >= 1
    (shown,) = blocks("json")
    # The numbers are another model's, and depend on the processor.
    assert json.loads(f"{{{shown}}}")["apar"].keys() == body["apar"].keys()


def test_the_command_that_the_server_prints_is_answered(server: Server) -> None:
    line = next(line for line in server.log.read_text().splitlines() if line.startswith("curl "))

    answer = subprocess.run(
        line,
        shell=True,
        env=os.environ | {"APAR_API_KEY": TOKEN},
        capture_output=True,
        timeout=REQUEST_S,
        check=True,
    ).stdout

    assert json.loads(answer)["choices"]


def test_the_openai_client_streams_the_answer(server: Server, tmp_path: Path) -> None:
    text = program("from openai import OpenAI")
    assert ADDRESS in text
    assert 'api_key="none"' in text
    script = tmp_path / "program.py"
    script.write_text(
        for_the_embedded_model(text)
        .replace(ADDRESS, server.url)
        .replace('api_key="none"', f'api_key="{TOKEN}"')
    )

    answer = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=REQUEST_S, check=False
    )

    assert answer.returncode == 0, answer.stderr
    assert_list(answer.stdout)
