"""A load test of the running application: answers recorded, then generated again exactly."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.loadtest.trace import read_trace
from cluster.local_ray import free_port
from tests.fakes.apar_command import APAR
from tests.integration.serving.apar_process import TINY, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

COMMAND = (*APAR, "loadtest", "run")


@dataclass(frozen=True)
class Application:
    """Where the application and its metrics are."""

    url: str
    metrics: str


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    port = free_port()
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder, TINY | {"replay": True}, metrics={"port": port}) as server:
        yield Application(server.url, f"127.0.0.1:{port}")


def load(application: Application, out: Path, *arguments: str) -> dict[str, Any]:
    """The figures of a run, all of whose requests have a whole answer."""
    done = subprocess.run(
        [*COMMAND, "--target", application.url, "--metrics", application.metrics, "--out",
         str(out), *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in lines(out) if "error" in line], done.stdout
    return dict(json.loads((out / "report.json").read_text()))


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]


def test_recorded_answers_are_generated_again_forked_and_flat(
    application: Application, tmp_path: Path
) -> None:
    trace, again, flat_again = (tmp_path / f"{name}.jsonl" for name in ("trace", "again", "flat"))
    load(
        application, tmp_path / "record", "--prompts", "held-out", "--answers", "24",
        "--concurrency", "8", "--save-answers", str(trace),
    )  # fmt: skip
    # A repeat may be over within seconds.
    replay = ["--replay", str(trace), "--repeats", "2", "--rate", "inf"]
    replay += ["--sample-every", "200ms"]
    forked = load(
        application, tmp_path / "forked", *replay, "--save-answers", str(again)
    )  # fmt: skip
    flat = load(
        application, tmp_path / "flat", *replay, "--no-fork", "--save-answers", str(flat_again)
    )  # fmt: skip

    recorded = {line.id: (line.prompt, line.response) for line in read_trace(trace)}
    assert len(recorded) == 24
    for path in (again, flat_again):
        assert {line.id: (line.prompt, line.response) for line in read_trace(path)} == recorded
    threads = {line["id"]: line["apar"]["threads"] for line in lines(tmp_path / "forked")}
    assert max(threads.values()) > 3
    assert {line["apar"]["threads"] for line in lines(tmp_path / "flat")} == {1}
    tokens = {line["id"]: line["text_tokens"] for line in lines(tmp_path / "forked")}
    assert tokens == {line["id"]: line["text_tokens"] for line in lines(tmp_path / "flat")}
    assert forked["figures"]["decode_steps"]["value"] < flat["figures"]["decode_steps"]["value"]
    assert_metrics_agree(tmp_path / "forked")


def assert_metrics_agree(out: Path) -> None:
    """What the servers counted is what the answers say of themselves."""
    facts = json.loads((out / "run.json").read_text())
    assert len(facts["repeats"]) == 2
    for repeat in facts["repeats"]:
        fields = [line["apar"] for line in lines(out) if line["repeat"] == repeat["repeat"]]
        assert len(fields) == 24
        cluster = repeat["cluster"]
        assert cluster["attended_tokens"] == sum(each["attended_tokens"] for each in fields)
        assert sum(cluster["forks"].values()) == sum(each["forks"] for each in fields)
        # Child tokens are given, not generated.
        assert cluster["generated_tokens"] == sum(
            each["text_tokens"] + each["control_tokens"] - each["forks"] for each in fields
        )
        assert cluster["moments"]
