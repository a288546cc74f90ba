"""`apar data generate` without an engine: answers of an endpoint, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apar_core.offline.data.example_file import read_examples
from tests.fakes.apar_command import apar, run
from tests.fakes.judge_server import Reply, judge_server

LIST = "\n".join(f"{n}. Point {n}: with some content." for n in (1, 2, 3))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("What helps?\nWho asks?\nWhy not?\n")
    return path


def reply_to(body: dict[str, Any], _number: int) -> Reply:
    asked = body["messages"][-1]["content"]
    if asked == "Who asks?":
        return Reply(400, "no answer to this one")
    return Reply(text=LIST if asked == "What helps?" else "yes " * 60)


def test_an_endpoint_answers_and_what_failed_is_asked_again(
    tmp_path: Path, questions: Path
) -> None:
    out = tmp_path / "out"
    with judge_server(reply_to) as server:
        arguments = (
            *("data", "generate", "--prompts", questions, "--out", out),
            *("--target", server.url, "--model-name", "served", "--max-tokens", "50"),
        )
        code, output = run(*arguments)
        first = list(server.requests)
        again = run(*arguments)

    assert code == 1
    assert "answers: 2 of 3" in output
    assert "Error: 1 requests failed" in output
    assert "question 1: " in output
    assert "no answer to this one" in output
    assert {request["model"] for request in first} == {"served"}
    assert {(each["max_tokens"], each["temperature"], each["top_p"]) for each in first} == {
        (50, 0.7, 0.9)
    }
    assert len({request["seed"] for request in first}) == 3
    assert [request["messages"][0]["content"] for request in server.requests[len(first) :]] == [
        "Who asks?"
    ]
    assert again[0] == 1
    report = json.loads((out / "report.json").read_text())
    assert report["answers"]["rejected"]["repetition"]["count"] == 1
    assert report["num_failed"] == 1
    assert apar("data", "prepare", out / "chats.jsonl", "--out", tmp_path / "data").exit_code == 0
    [example] = read_examples(tmp_path / "data")
    assert example.messages[-1].content == "What helps?"


def test_a_thought_that_a_server_sends_apart_is_kept(tmp_path: Path, questions: Path) -> None:
    message = {"role": "assistant", "content": LIST, "reasoning": "Let me see."}
    body = {
        **{"id": "1", "object": "chat.completion", "created": 0, "model": "m"},
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    with judge_server(lambda _body, _number: Reply(body=json.dumps(body))) as server:
        code, output = run(
            *("data", "generate", "--prompts", questions, "--out", tmp_path / "out"),
            *("--target", server.url, "--model-name", "m"),
        )

    assert code == 0, output
    chat = json.loads((tmp_path / "out" / "chats.jsonl").read_text().splitlines()[0])
    assert chat["messages"][1]["content"] == f"<think>\nLet me see.\n</think>\n\n{LIST}"


def test_an_answer_without_its_end_is_left_out(tmp_path: Path, questions: Path) -> None:
    body = {
        **{"id": "1", "object": "chat.completion", "created": 0, "model": "m"},
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": LIST},
                "finish_reason": "length",
            }
        ],
    }
    with judge_server(lambda _body, _number: Reply(body=json.dumps(body))) as server:
        code, output = run(
            *("data", "generate", "--prompts", questions, "--out", tmp_path / "out"),
            *("--target", server.url, "--model-name", "m"),
        )

    assert code == 0, output
    assert "cut at the token limit 3" in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model-name", "m"), "--model-name m needs --target"),
        (("--target", "http://h/v1"), "--target http://h/v1 also needs --model-name"),
        (("--target", "host", "--model-name", "m"), "'host' is not a URL"),
        (("--model", "apar-tiny", "--prompts", "FILE", "--system", "S"), "--system steers sampled"),
        (("--model", "/no/such/model"), "no such folder: /no/such/model"),
        (("--prompts", "EMPTY", "--model", "apar-tiny"), "contains no questions"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, questions: Path, options: tuple[str, ...], words: str
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    files = {"FILE": str(questions), "EMPTY": str(empty)}
    given = [files.get(option, option) for option in options]

    code, output = run("data", "generate", *given, "--out", tmp_path / "out")

    assert code == 1
    assert words in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()
