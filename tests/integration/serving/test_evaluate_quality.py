"""`apar evaluate quality` with our server as model and as judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from tests.integration.serving.apar_process import TOKEN, Server

pytestmark = pytest.mark.cluster
FASTCHAT = Path(__file__).resolve().parents[4] / "shared" / "data" / "fastchat"


@pytest.mark.skipif(not FASTCHAT.is_dir(), reason=f"{FASTCHAT} is not here")
def test_a_judge_that_gives_no_ratings_is_counted_and_not_waited_for(
    server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "quality"
    arguments = [
        *("evaluate", "quality", "--prompts", "vicuna-bench", "--answers", "3"),
        *("--benchmark-files", str(FASTCHAT), "--out", str(out), "--rating-attempts", "2"),
        *("--target", f"{server.url}/v1", "--model-name", "apar-tiny"),
        *("--judge", f"{server.url}/v1", "--judge-model", "apar-tiny"),
        *("--max-tokens", "60", "--max-judgment-tokens", "40"),
    ]

    environment = {"COLUMNS": "200", "APAR_API_KEY": TOKEN, "OPENAI_API_KEY": TOKEN}
    result = CliRunner().invoke(app, arguments, env=environment)

    assert result.exit_code == 0, result.output
    judgments = [json.loads(line) for line in (out / "judgments.jsonl").open()]
    # apar-tiny knows nothing of judging: each judgment was asked for twice and has no rating.
    assert {judgment["question_id"] for judgment in judgments} == {"1", "2", "3"}
    assert [(line["rating"], line["requests"]) for line in judgments] == [(None, 2)] * 3
    assert all(line["prompt_tokens"] > 100 and line["text"] for line in judgments)
    answers = [json.loads(line) for line in (out / "answers_apar-tiny.jsonl").open()]
    assert len(answers) == 3
    assert all(answer["choices"][0]["turns"][0] for answer in answers)
    assert "3, 3 of them without a rating" in (out / "report.md").read_text()
    server.wait_until_idle()
