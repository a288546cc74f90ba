"""`apar loadtest` as a command, against a scripted server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from apar_core.workload.trace import read_trace
from cluster.cli.main import app
from cluster.local_ray import free_port
from cluster.metrics import catalogue
from tests.fakes.chat_server import Reply, chat_server
from tests.fakes.metrics_page import busy_page, served

COMMAND = [sys.executable, "-c", "from cluster.cli.main import app; app()", "loadtest"]
DEADLINE_S = 60.0


def prompts(folder: Path, number: int = 6) -> str:
    path = folder / "prompts.txt"
    path.write_text("".join(f"Question {each}?\n" for each in range(number)))
    return f"prompts:{path}"


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["loadtest", *arguments], env={"COLUMNS": "250", "TERM": "dumb"}
    )
    return result.exit_code, result.output


def reply(body: dict[str, Any], number: int) -> Reply:
    said = body["messages"][-1]["content"]
    return Reply((f"Answer to {said}\n", "more"), first_s=0.02, apar={"threads": 1})


def test_a_run_is_written_shown_and_compared(tmp_path: Path) -> None:
    work = prompts(tmp_path)
    with chat_server(reply) as server, served(busy_page().text()) as page:
        for name, more in (
            ("one", ["--repeats", "2"]),
            ("two", ["--metrics", page.url, "--settle-s", "0.1"]),
        ):
            code, output = run(
                "--target", server.url, "--workload", work, "--arrivals", "closed:3",
                "--sample-s", "0.1", "--slo", "ttft=1s", "--out", str(tmp_path / name), *more,
            )  # fmt: skip
            assert code == 0, output
    code, compared = run(
        "compare", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "both")
    )

    requests = lines(tmp_path / "one")
    assert len(requests) == 12
    assert {(line["repeat"], line["index"]) for line in requests} == {
        (repeat, index) for repeat in range(2) for index in range(6)
    }
    assert all(line["text_tokens"] == 2 and line["apar"] == {"threads": 1} for line in requests)
    # Beside them one warm-up request of each run.
    assert len(server.bodies) == 13 + 7
    for words in ("time to first token", "goodput", "Metrics of the servers", "report.html"):
        assert words in output
    assert code == 0, compared
    assert "Ratio" in compared
    assert (tmp_path / "both" / "report.html").exists()


def test_saved_answers_are_a_trace_that_can_be_read_again(tmp_path: Path) -> None:
    answers = tmp_path / "saved" / "trace.jsonl"
    with chat_server(reply) as server:
        code, output = run(
            "--target", server.url, "--workload", prompts(tmp_path, 3), "--requests", "5",
            "--out", str(tmp_path / "out"), "--save-answers", str(answers),
        )  # fmt: skip

    assert code == 0, output
    assert "2 requests per repeat are repetitions" in output
    found = {line.id: line for line in read_trace(answers)}
    assert sorted(found) == ["1", "2", "3"]
    assert found["2"].prompt == "Question 1?"
    assert found["2"].response == "Answer to Question 1?\nmore"


def test_what_the_servers_tell_late_of_the_warm_up_is_not_the_first_repeats(tmp_path: Path) -> None:
    page, lock = busy_page(), threading.Lock()
    with served(page.text()) as pages:

        def tell(tokens: float) -> None:
            with lock:
                page.add(catalogue.GENERATED_TOKENS, tokens, model="apar-tiny", replica="r1")
                pages.body = page.text()

        def script(body: dict[str, Any], number: int) -> Reply:
            threading.Timer(0.8, tell, [1000 if number == 0 else 10]).start()
            return reply(body, number)

        with chat_server(script) as server:
            code, output = run(
                "--target", server.url, "--workload", prompts(tmp_path), "--metrics", pages.url,
                "--settle-s", "1.5", "--out", str(tmp_path / "out"),
            )  # fmt: skip

    assert code == 0, output
    (repeat,) = json.loads((tmp_path / "out" / "run.json").read_text())["repeats"]
    assert repeat["cluster"]["generated_tokens"] == 60


def test_errors_are_counted_by_kind_and_the_rest_goes_on(tmp_path: Path) -> None:
    replies = [Reply(status=429), Reply(status=503), Reply(ending="cut"), Reply(ending="hang")]

    def script(body: dict[str, Any], number: int) -> Reply:
        return replies[number] if number < len(replies) else reply(body, number)

    with chat_server(script) as server:
        code, output = run(
            "--target", server.url, "--workload", prompts(tmp_path), "--warm-up", "0",
            "--timeout", "0.5", "--arrivals", "closed:1", "--out", str(tmp_path / "out"),
        )  # fmt: skip

    assert code == 0, output
    kinds = [line.get("error") for line in lines(tmp_path / "out")]
    assert kinds == ["http_429", "http_503", "cut", "timeout", None, None]
    assert "4 of 6 requests have no complete answer" in output
    for kind in ("http_429", "http_503", "cut", "timeout"):
        assert kind in output


def test_a_run_in_which_nothing_succeeds_ends_with_code_1(tmp_path: Path) -> None:
    with chat_server(lambda body, number: Reply(status=503)) as server:
        code, output = run(
            "--target", server.url, "--workload", prompts(tmp_path), "--out", str(tmp_path / "out")
        )

    assert code == 1
    assert "no request succeeded" in output


def test_what_is_wrong_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    work = prompts(tmp_path)
    with chat_server(reply) as server:
        right = ["--target", server.url, "--workload", work, "--out", str(tmp_path / "out")]
        for extra, problem in (
            (["--model", "other"], "--model 'other'"),
            (["--arrivals", "poisson:0"], "poisson:0"),
            (["--slo", "ttft=1"], "--slo 'ttft=1'"),
            (["--extra-body", "[1]"], "--extra-body '[1]' is no JSON object"),
            (["--extra-body", "{"], "--extra-body '{' is no JSON"),
            (["--workload", "prompts:none"], "'none' is neither"),
            (["--target", f"127.0.0.1:{free_port()}"], "cannot be reached"),
        ):
            code, output = run(*right, *extra)
            assert code == 1, output
            assert problem in output
            assert server.bodies == []
    assert "--workload is missing" in run("--target", "127.0.0.1:1")[1]


def test_metrics_that_cannot_be_read_end_the_run_after_the_warm_up(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with chat_server(reply) as server:
        code, output = run(
            "--target", server.url, "--workload", prompts(tmp_path), "--warm-up", "2",
            "--metrics", address, "--out", str(tmp_path / "out"),
        )  # fmt: skip

    assert code == 1, output
    assert f"--metrics: http://{address}/metrics no answer" in output
    assert len(server.bodies) == 2
    assert lines(tmp_path / "out") == []


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("{}\n")
    with chat_server(reply) as server:
        code, output = run(
            "--target", server.url, "--workload", prompts(tmp_path), "--out", str(tmp_path)
        )

    assert code == 1
    assert "already contains a run" in output


def test_a_folder_without_a_run_cannot_be_compared(tmp_path: Path) -> None:
    code, output = run("compare", str(tmp_path), str(tmp_path))

    assert code == 1
    assert "contains no run of apar loadtest" in output


def test_ctrl_c_writes_what_there_is(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def script(body: dict[str, Any], number: int) -> Reply:
        return reply(body, number) if number < 4 else Reply(ending="hang")

    with chat_server(script) as server:
        process = subprocess.Popen(
            [*COMMAND, "--target", server.url, "--workload", prompts(tmp_path, 9), "--out",
             str(out), "--arrivals", "closed:3", "--warm-up", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + DEADLINE_S
        while len(server.bodies) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 0, output
    errors = [line.get("error") for line in lines(out)]
    assert errors == [None] * 4 + ["cancelled"] * 3
    assert "was interrupted after 7 of 9 requests" in " ".join(output.split())
    assert (out / "report.html").exists()
