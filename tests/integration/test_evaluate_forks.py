"""Run `apar evaluate forks` on the embedded models as a user does: with a real engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.evaluation.replay_text import load_text
from tests.fakes.apar_command import APAR

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = (
    "Give me 5 tips for learning guitar.",
    "Tell me a story",
    "What is the capital of France?",
)


def evaluate(out: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Return the report, the stored answers, and what was printed."""
    file = out.parent / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in QUESTIONS))
    done = subprocess.run(
        [
            *(*APAR, "evaluate", "forks", "--prompts", str(file), "--out", str(out)),
            *("--requests", "2", "--repeats", "1", "--max-tokens", "300", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return json.loads((out / "report.json").read_text()), answers, done.stdout


def plain_loss(prompt: list[int], text: list[int]) -> float:
    """Return the log-loss of a text behind a prompt, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    return float(cross_entropy(logits, torch.tensor(text), reduction="sum"))


@pytest.mark.ci
def test_answers_and_their_replays_agree(tmp_path: Path) -> None:
    out = tmp_path / "forks"
    report, answers, printed = evaluate(out, "--base", "apar-tiny")

    assert "Speed of answers that fork" in printed
    ours = {each["question_id"]: each for each in answers if each["source"] == "model"}
    theirs = {each["question_id"]: each for each in answers if each["source"] == "base"}
    guitar = ours["1"]
    text = guitar["text"]
    # The engine's own counts.
    assert len(guitar["threads"]) == guitar["statistics"]["threads"] == 6
    assert len(guitar["places"]) == guitar["statistics"]["forks"] == 5
    assert len(guitar["token_ids"]) == guitar["statistics"]["text_tokens"]
    assert all(each["misplaced"] == 0 for each in ours.values())
    assert report["numbers"]["place_precision"]["value"] == 1
    assert report["numbers"]["place_recall"]["value"] == 1
    # The other one may not fork.
    assert all(len(each["threads"]) == 1 for each in theirs.values())
    assert theirs["1"]["statistics"]["forks"] == 0
    # A replay that generates another text is an error, so both ways generated this one.
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    figures = {each["key"]["method"]: each["figures"] for each in runs}
    assert figures["forked"]["text_tokens"] == figures["sequential"]["text_tokens"]
    assert figures["forked"]["steps"] < figures["sequential"]["steps"]
    forked = [each for each in ours.values() if len(each["threads"]) > 1]
    attended = {each["statistics"]["attended_tokens"] for each in forked}
    if len(forked) == 1:
        assert {figures["forked"]["attended_tokens"]} == attended
    losses = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    of_guitar = next(each for each in losses if each["source"] == "model")
    plain = plain_loss(guitar["prompt_ids"], load_text(str(checkpoint_path())).encode(text))
    assert of_guitar["loss"] == pytest.approx(plain, rel=0.02)


def test_a_model_whose_parent_waits_is_replayed_too(tmp_path: Path) -> None:
    report, answers, printed = evaluate(
        tmp_path / "forks", "--model", "apar-tiny-threadweaver", "--max-tokens", "600"
    )

    assert "Places of forks: not counted" in printed
    guitar = answers[0]
    assert guitar["statistics"]["joins"] == 1
    assert guitar["places"] is None
    assert len(guitar["threads"]) == guitar["statistics"]["threads"] > 2
    assert {row[1] for row in report["tables"]["speed"]["rows"]} == {
        "forked",
        "the same text, one thread",
    }
