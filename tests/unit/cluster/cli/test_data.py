"""`apar data prepare`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.example_file import read_examples
from apar_core.offline.evaluation.answer_files import read_answer_set
from apar_core.offline.evaluation.prompt_sets import read_question_file
from apar_core.offline.training.example_encoder import ExampleEncoder
from cluster.loadtest.trace import read_trace
from tests.fakes.apar_command import APAR, apar

LIST = "\n".join(f"{n}. Point {n}: with some content." for n in (1, 2, 3))


def chat(answer: str) -> str:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": answer}]
    return json.dumps({"conversations": turns}) + "\n"


def run(*arguments: str | Path) -> tuple[int, str]:
    result = apar("data", "prepare", *arguments)
    return result.exit_code, result.output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(chat(LIST) + "{broken\n" + chat("Short."))
    return path


def test_the_report_shows_kinds_refusals_and_samples(source: Path, tmp_path: Path) -> None:
    exit_code, output = run(source, "--out", tmp_path / "out", "--structured", "5")

    assert exit_code == 0
    for words in (
        "3 items read",
        "ordered_list",
        "unstructured: no structure",
        "broken JSON",
        "line 2",
        "structured: 1 examples of 1 found (5 wanted)",
    ):
        assert words in output
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["report.json", "structured.jsonl", "unstructured.jsonl"]


@pytest.mark.parametrize(
    ("text", "words"), [("[]", "contain no chats"), ("{", "No answer could be used")]
)
def test_a_run_without_usable_chats_fails(tmp_path: Path, text: str, words: str) -> None:
    source = tmp_path / "chats.json"
    source.write_text(text)

    exit_code, output = run(source, "--out", tmp_path / "out")

    assert exit_code == 1
    assert words in output
    assert "Nothing was written" in output
    assert not (tmp_path / "out").exists()


def test_a_file_that_breaks_off_fails_after_writing_what_came_before(tmp_path: Path) -> None:
    source = tmp_path / "chats.json"
    source.write_text("[" + chat(LIST) + ', {"conversations": [')

    exit_code, output = run(source, "--out", tmp_path / "out")

    assert exit_code == 1
    assert "chats.json, item 2: damaged array: the file ends before the array does" in output
    assert len(list(read_examples(tmp_path / "out"))) == 1


def test_zero_keeps_all(source: Path, tmp_path: Path) -> None:
    run(source, "--out", tmp_path / "out", "--structured", "0", "--unstructured", "0")

    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["structured"] == {"found": 1, "wanted": None, "written": 1}


def test_with_a_model_examples_fit_its_context_and_none_is_lost_in_training(
    tmp_path: Path,
) -> None:
    def turns(number: int) -> list[dict[str, str]]:
        said = [("human", f"Question {number}? " + "word " * 20), ("gpt", LIST)] * (1 + number % 4)
        return [{"from": role, "value": text} for role, text in said]

    source = tmp_path / "chats.jsonl"
    items = [turns(number) for number in range(12)]
    items.append([{"from": "human", "value": "q"}, {"from": "gpt", "value": "word " * 300}])
    source.write_text("".join(json.dumps({"conversations": item}) + "\n" for item in items))
    options = ("--model", "apar-tiny", "--context-length", "165", "--hold-out", "2")

    exit_code, output = run(source, "--out", tmp_path / "out", *options, "--structured", "15")

    assert exit_code == 0, output
    assert "structured: 15 examples of" in output
    assert "too long for 165 tokens: 1 answers" in output
    assert "held out: 2 queries of 2 wanted, from 12 candidates" in output
    # Of the 31 answers, the one that is too long is not counted.
    assert "in 100.0% of the answers (the paper's ShareGPT: 32%), in 12 of 12 chats" in output
    encoder = ExampleEncoder(AutoTokenizer.from_pretrained(checkpoint_path()), 165)
    encoder.encode_all(read_examples(tmp_path / "out"))
    assert (encoder.counts.whole, encoder.counts.shortened) == (15, 0)
    assert max(len(line.messages) for line in read_examples(tmp_path / "out")) > 1
    # The commands of evaluation and of figure 5 read the held-out queries.
    held = tmp_path / "out" / "held_out.jsonl"
    assert len(read_question_file(held)) == len(read_answer_set(held).answers) == 2
    assert len(list(read_trace(held))) == 2


def test_an_unusable_model_is_an_error_before_anything_is_read(
    source: Path, tmp_path: Path
) -> None:
    exit_code, output = run(source, "--out", tmp_path / "out", "--model", "/nowhere/model")

    assert exit_code == 1
    assert "no such folder: /nowhere/model" in output
    assert not (tmp_path / "out").exists()


def test_strict_exits_with_1_and_names_the_line(source: Path, tmp_path: Path) -> None:
    exit_code, output = run(source, "--out", tmp_path / "out", "--strict")

    assert exit_code == 1
    assert "line 2: broken JSON" in output
    assert not (tmp_path / "out").exists()


def test_a_full_folder_is_refused_without_overwrite(source: Path, tmp_path: Path) -> None:
    assert run(source, "--out", tmp_path / "out")[0] == 0

    exit_code, output = run(source, "--out", tmp_path / "out")

    assert exit_code == 1
    assert "is not empty" in output
    assert run(source, "--out", tmp_path / "out", "--overwrite")[0] == 0


def test_bad_options_are_usage_errors(source: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "none.json", "--out", tmp_path / "out")[0] == 2
    for option in ("--structured", "--unstructured", "--seed"):
        assert run(source, "--out", tmp_path / "out", option, "-1")[0] == 2
    assert run(source, "--out", tmp_path / "out", "--workers", "0")[0] == 2


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_ctrl_c_leaves_nothing_and_no_traceback(tmp_path: Path, workers: str) -> None:
    # A pipe that nobody closes: the command waits for more while it is interrupted.
    source, out = tmp_path / "chats.jsonl", tmp_path / "out"
    os.mkfifo(source)
    process = subprocess.Popen(
        [*APAR, "data", "prepare", str(source), "--out", str(out), "--workers", workers],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with source.open("w") as pipe:
        pipe.write(chat(LIST) * 200)
        pipe.flush()
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".out-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(tmp_path.glob(".out-*"))
        # In the midst of reading; the worker processes may be up, or still starting.
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)

    assert process.returncode == 130
    assert "Interrupted; nothing was written" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == [source]


def test_a_chat_that_the_template_refuses_is_counted_and_the_others_are_kept(
    tmp_path: Path,
) -> None:
    source, template = tmp_path / "chats.jsonl", tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}"
        "{% if m['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    chat = [{"from": "human", "value": "q"}, {"from": "gpt", "value": LIST}]
    chats = [chat, [{"from": "system", "value": "s"}, *chat]]
    source.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in chats))

    exit_code, output = run(
        source, "--out", tmp_path / "out", "--model", "apar-tiny", "--chat-template", template
    )

    assert exit_code == 0, output
    assert "refused by the chat template" in output
    assert len(list(read_examples(tmp_path / "out"))) == 1


def test_a_mix_without_held_out_queries_is_refused(source: Path, tmp_path: Path) -> None:
    exit_code, output = run(source, "--out", tmp_path / "out", "--hold-out-mixed")

    assert exit_code == 2
    assert "has no effect without --hold-out" in output
