"""`apar evaluate`: what a user types, sees and gets as exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import apar_command
from tests.fakes.judge_server import Reply, judge_server
from tests.integration.random_checkpoint import write_checkpoint

FASTCHAT = Path(__file__).resolve().parents[5] / "shared" / "data" / "fastchat"
needs_fastchat = pytest.mark.skipif(not FASTCHAT.is_dir(), reason=f"{FASTCHAT} is not here")


def run(*arguments: str | Path) -> tuple[int, str]:
    return apar_command.run("evaluate", *arguments)


def answer_file(folder: Path) -> Path:
    path = folder / "answers.jsonl"
    line = {"question_id": 81, "model_id": "tested", "choices": [{"turns": ["Aloha!", "Aye."]}]}
    path.write_text(json.dumps(line) + "\n")
    return path


def test_the_parts_of_an_evaluation_are_listed() -> None:
    code, output = run("--help")

    assert code == 0
    assert all(
        name in output for name in ("forks", "speed", "acceptance", "passes", "quality", "fetch")
    )


@pytest.mark.parametrize("option", ["--model", "--base"])
def test_forks_of_a_model_that_is_not_there(option: str, tmp_path: Path) -> None:
    missing = tmp_path / "none"

    code, output = run("forks", option, missing, "--out", tmp_path / "out")

    assert code == 1
    assert f"Error: {option} {missing}: checkpoint: no such folder" in output
    assert not (tmp_path / "out").exists()


def test_the_embedded_models_guesses_are_shown_and_plotted(tmp_path: Path) -> None:
    code, output = run("acceptance", "--out", tmp_path)

    assert code == 0, output
    assert "Prompt tokens" in output
    assert "Medusa heads" in output
    assert (tmp_path / "acceptance.png").is_file()


@pytest.mark.slow
def test_measured_passes_size_the_trees_of_a_decoder(tmp_path: Path) -> None:
    code, output = run("passes", "--context", "8", "--repeats", "1", "--out", tmp_path / "passes")
    assert code == 0, output
    assert "Speed-up" in output

    file = tmp_path / "passes" / "passes.json"
    code, output = apar_command.run(
        *("generate", "Tell me a story", "--decoder", "medusa_apar", "--max-tokens", "3"),
        *("--pass-times", file),
    )
    assert code == 0, output
    code, output = run("speed", "--pass-times", file, "--out", tmp_path / "speed")
    assert code == 1
    assert "Error: --pass-times is for decoders with candidate trees" in output
    code, output = apar_command.run(
        "generate", "Hello", "--decoder", "plain", "--pass-times", tmp_path / "none"
    )
    assert code == 1
    assert "decoder plain has no candidate trees" in output


def test_acceptance_of_another_model_needs_weights(tmp_path: Path) -> None:
    code, output = run("acceptance", "--model", "m", "--out", tmp_path)

    assert code == 1
    assert "Error: nothing to evaluate: give --prompt-tokens or --medusa-heads" in output


def test_acceptance_names_the_folder_that_has_no_weights(tmp_path: Path) -> None:
    code, output = run("acceptance", "--prompt-tokens", tmp_path / "none", "--out", tmp_path)

    assert code == 1
    assert str(tmp_path / "none") in output
    assert "Traceback" not in output


def test_fetching_offline_ends_with_one_line(tmp_path: Path) -> None:
    code, output = run("fetch", "--out", tmp_path, "--mirror", "http://127.0.0.1:9")

    assert code == 1
    assert "Error: http://127.0.0.1:9/vicuna_bench/question.jsonl cannot be reached" in output
    assert "Traceback" not in output


@needs_fastchat
def test_answers_are_judged_and_reported(tmp_path: Path) -> None:
    with judge_server(lambda _body, _number: Reply(text="Fine. [[7]]")) as server:
        code, output = run(
            *("quality", "--judge", server.url, "--judge-model", "judge", "--out", tmp_path / "o"),
            *("--answer-file", answer_file(tmp_path), "--benchmark-files", FASTCHAT),
            *("--prompt-price", "10", "--completion-price", "30"),
        )

    assert code == 0, output
    assert "judging by judge: 2 of 2" in output
    assert "tested" in output
    assert "7.00" in output
    assert (tmp_path / "o" / "report.html").is_file()


@needs_fastchat
@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ((), {"max_tokens": 2048, "temperature": 0.0}),
        (
            ("--judge-token-field", "max_completion_tokens", "--judge-temperature", "none"),
            {"max_completion_tokens": 2048},
        ),
        (("--max-judgment-tokens", "0", "--judge-temperature", "1"), {"temperature": 1.0}),
        (("--max-judgment-tokens", "0", "--judge-temperature", "none"), {}),
    ],
)
def test_token_limit_and_temperature_are_sent_as_the_judge_accepts_them(
    tmp_path: Path, options: tuple[str, ...], sent: dict[str, float]
) -> None:
    def reasoning_judge(body: dict[str, Any], _number: int) -> Reply:
        taken = {name: body[name] for name in body if name not in ("model", "messages")}
        return Reply(text="[[7]]") if taken == sent else Reply(400, f"not supported: {taken}")

    with judge_server(reasoning_judge) as server:
        code, output = run(
            *("quality", "--judge", server.url, "--judge-model", "judge"),
            *("--out", str(tmp_path / "o"), "--answer-file", str(answer_file(tmp_path))),
            *("--benchmark-files", str(FASTCHAT), *options),
        )

    assert code == 0, output
    assert "7.00" in output


@needs_fastchat
def test_a_retry_for_a_rating_is_not_greedy(tmp_path: Path) -> None:
    def shy(body: dict[str, Any], _number: int) -> Reply:
        return Reply(text="[[7]]" if body.get("temperature") == 0.7 else "Hm.")

    with judge_server(shy) as server:
        code, output = run(
            *("quality", "--judge", server.url, "--judge-model", "judge", "--out", tmp_path / "o"),
            *("--answer-file", answer_file(tmp_path), "--benchmark-files", FASTCHAT),
        )

    assert code == 0, output
    assert len(server.requests) == 4


@needs_fastchat
def test_a_failing_judge_exits_with_1_and_says_how_to_continue(tmp_path: Path) -> None:
    with judge_server(lambda _body, _number: Reply(400, "no [thing]")) as server:
        code, output = run(
            *("quality", "--judge", server.url, "--judge-model", "judge", "--out", tmp_path / "o"),
            *("--answer-file", answer_file(tmp_path), "--benchmark-files", FASTCHAT),
        )

    assert code == 1
    assert "2 requests failed; run the same command again to continue" in output
    assert "HTTP 400, no [thing]" in output
    assert (tmp_path / "o" / "report.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--judge", "localhost:1", "--judge-model", "x"), "'localhost:1' is not a URL"),
        (
            ("--judge", "http://x/v1", "--judge-model", "x"),
            "nothing to rate: give --answer-file",
        ),
        (
            ("--judge", "http://x/v1", "--judge-model", "x", "--target", "http://y/v1"),
            "--target http://y/v1 also needs --model-name",
        ),
        (
            ("--judge", "http://x/v1", "--judge-model", "x", "--prompts", "mt"),
            "'mt' is neither one of vicuna-bench",
        ),
        (
            ("--judge", "http://x/v1", "--judge-model", "x", "--judge-temperature", "hot"),
            "--judge-temperature 'hot' is neither a number of at least 0 nor none",
        ),
        (
            ("--judge", "http://x/v1", "--judge-model", "x", "--judge-token-field", "n"),
            "--judge-token-field 'n' is none of max_tokens, max_completion_tokens",
        ),
    ],
)
@needs_fastchat
def test_unusable_options_are_reported_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, output = run("quality", *arguments, "--out", tmp_path, "--benchmark-files", FASTCHAT)

    assert code == 1
    assert message in output
    assert "Traceback" not in output


def test_a_trace_is_counted_without_a_model(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    text = "".join(f"{i}. Point: A detail that is long enough.\n" for i in range(1, 4))
    trace.write_text(json.dumps({"prompt": "Points?", "response": text, "category": "tips"}))

    code, output = run("speed", "--replay", trace, "--count-only", "--out", tmp_path / "out")

    assert code == 0, output
    assert "Table 1: average max cached tokens" in output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["tables"]["threads_mine"]["rows"] == [["Other", 4, 1], ["Mean", 4, 1]]


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A checkpoint without control tokens and without a chat template."""
    return write_checkpoint(tmp_path / "original")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tips?"}]
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def measured(out: Path) -> dict[str, dict[str, Any]]:
    """The answers by the name of their decoder."""
    lines = [json.loads(line) for line in (out / "answers.jsonl").open()]
    return {line["decoder"]: line for line in lines}


def test_a_checkpoint_without_control_tokens_is_measured_by_plain(
    tmp_path: Path, original: Path, questions: Path
) -> None:
    code, output = run(
        *("speed", "--model", original, "--decoders", "plain", "--against", "none"),
        *("--prompts", questions, "--out", tmp_path / "out", "--max-tokens", "20"),
    )

    assert code == 0, output
    assert measured(tmp_path / "out")["plain"]["threads"] == 1


def test_the_original_model_is_the_baseline_with_its_own_answers(
    tmp_path: Path, original: Path, questions: Path
) -> None:
    arguments = ("speed", "--against-model", original, "--prompts", questions, "--answers", "1")
    code, output = run(*arguments, "--out", tmp_path / "out", "--max-tokens", "60")

    assert code == 0, output
    answers = measured(tmp_path / "out")
    baseline = answers[f"plain of {original}"]
    assert set(answers) == {"vanilla_apar", f"plain of {original}"}
    assert baseline["text"] != answers["vanilla_apar"]["text"]
    # The prompt and the answer are in the original's own tokens, which are bytes.
    assert baseline["num_prompt_tokens"] == len("Be brief. USER: Tips? ASSISTANT:")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["facts"]["Decoder"] == f"vanilla_apar, compared with plain of {original}"
    assert (tmp_path / "out" / "figure4_speed.svg").is_file()


def test_recorded_answers_are_replayed_through_the_original_model(
    tmp_path: Path, original: Path
) -> None:
    trace = tmp_path / "mine.jsonl"
    text = "".join(f"{i}. A: long enough.\n" for i in range(1, 4))
    history = [{"role": "system", "content": "Be brief."}]
    trace.write_text(json.dumps({"prompt": "Points?", "response": text, "history": history}))

    code, output = run(
        *("speed", "--replay", trace, "--against-model", original, "--out", tmp_path / "out")
    )

    assert code == 0, output
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers-mine.jsonl").open()]
    assert {line["decoder"]: line["threads"] for line in lines} == {
        "vanilla_apar": 4,
        f"plain of {original}": 1,
    }


def test_a_checkpoint_without_control_tokens_cannot_fork(
    tmp_path: Path, original: Path, questions: Path
) -> None:
    code, output = run(
        *("speed", "--model", original, "--prompts", questions, "--out", tmp_path / "out")
    )

    assert code == 1
    assert "vanilla_apar needs a model with control tokens" in output


def test_an_unknown_decoder_is_named(tmp_path: Path) -> None:
    code, output = run("speed", "--decoders", "plain,fast", "--out", tmp_path)

    assert code == 2
    assert "Invalid value for '--decoders': 'fast' is not one of plain, vanilla_apar" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--count-only",), "--count-only needs answers to --replay"),
        (
            ("--prompts", "mt"),
            "'mt' is neither one of vicuna-bench, mt-bench, human-eval, held-out",
        ),
        (("--against", "vanilla_apar"), "the same decoder twice"),
        (
            ("--against", "none", "--against-model", "o"),
            "--against-model needs --against plain or vanilla_apar, not none",
        ),
    ],
)
def test_refused_combinations_of_options_are_reported_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, output = run("speed", *arguments, "--out", tmp_path)

    assert code == 1
    assert message in output
    assert "Traceback" not in output
