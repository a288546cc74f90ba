"""`apar loadtest` as a command, against a scripted server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.loadtest.trace import read_trace
from cluster.local_ray import free_port
from deployments.metrics import catalogue
from tests.fakes import apar_command
from tests.fakes.apar_command import APAR
from tests.fakes.chat_server import Reply, chat_server
from tests.fakes.metrics_page import busy_page, served

DEADLINE_S = 120.0


def prompts(folder: Path, number: int = 6) -> str:
    path = folder / "prompts.txt"
    path.write_text("".join(f"Question {each}?\n" for each in range(number)))
    return str(path)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]


def run(*arguments: str) -> tuple[int, str]:
    return apar_command.run("loadtest", "run", *arguments)


def reply(body: dict[str, Any], number: int) -> Reply:
    said = body["messages"][-1]["content"]
    return Reply((f"Answer to {said}\n", "more"), first_s=0.02, apar={"threads": 1})


def test_a_run_is_written_shown_and_compared(tmp_path: Path) -> None:
    work = prompts(tmp_path)
    with chat_server(reply) as server, served(busy_page().text()) as page:
        for name, more in (
            ("one", ["--repeats", "2"]),
            ("two", ["--metrics", page.url, "--settle-time", "100ms"]),
        ):
            code, output = run(
                "--target", server.url, "--prompts", work, "--concurrency", "3",
                "--sample-every", "100ms", "--slo", "ttft=1s", "--out", str(tmp_path / name), *more,
            )  # fmt: skip
            assert code == 0, output
    code, compared = apar_command.run(
        "loadtest",
        "compare",
        str(tmp_path / "one"),
        str(tmp_path / "two"),
        "--out",
        str(tmp_path / "both"),
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
    facts = json.loads((tmp_path / "two" / "report.json").read_text())["facts"]
    assert facts["Server"] == "vLLM 0.32.1, on the client's machine"
    assert facts["Client"].startswith(f"apar-serve {version('apar-serve')}, Python 3.")
    assert f"{os.cpu_count()} cores of " in facts["Client"]
    assert code == 0, compared
    assert "Ratio" in compared
    assert (tmp_path / "both" / "report.html").exists()


def test_saved_answers_are_a_trace_that_can_be_read_again(tmp_path: Path) -> None:
    answers = tmp_path / "saved" / "trace.jsonl"
    with chat_server(reply) as server:
        code, output = run(
            "--target", server.url, "--prompts", prompts(tmp_path, 3), "--rate", "inf",
            "--answers", "5",
            "--out", str(tmp_path / "out"), "--save-answers", str(answers),
        )  # fmt: skip

    assert code == 0, output
    assert "2 requests per repeat are repetitions" in output
    found = {line.id: line for line in read_trace(answers)}
    assert sorted(found) == ["1", "2", "3"]
    assert found["2"].prompt == "Question 1?"
    assert found["2"].response == "Answer to Question 1?\nmore"


def test_late_counters_of_the_warm_up_do_not_count_for_the_first_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = busy_page()
    with served(page.text()) as pages:
        # For the watches, time passes by readings. A counter is three readings late, and the watch
        # waits for four readings without an increase.
        clock = SimpleNamespace(
            perf_counter=lambda: pages.num_asked / 16, process_time=time.process_time
        )
        monkeypatch.setattr("cluster.loadtest.watches.time", clock)
        told_at: list[tuple[int, float]] = []

        def tell(number: int) -> None:
            while told_at and told_at[0][0] <= number:
                tokens = told_at.pop(0)[1]
                page.add(catalogue.GENERATED_TOKENS, tokens, model="apar-tiny", replica="r1")
                pages.body = page.text()

        def script(body: dict[str, Any], number: int) -> Reply:
            told_at.append((pages.num_asked + 3, 1000 if number == 0 else 10))
            return reply(body, number)

        pages.before = tell

        with chat_server(script) as server:
            code, output = run(
                "--target", server.url, "--prompts", prompts(tmp_path), "--rate", "inf",
                "--metrics", pages.url,
                "--settle-time", "250ms", "--out", str(tmp_path / "out"),
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
            "--target", server.url, "--prompts", prompts(tmp_path), "--warm-up", "0",
            "--timeout", "4s", "--concurrency", "1", "--out", str(tmp_path / "out"),
        )  # fmt: skip

    assert code == 0, output
    kinds = [line.get("error") for line in lines(tmp_path / "out")]
    assert kinds == ["http_429", "http_503", "cut", "timeout", None, None]
    assert "4 of 6 requests have no complete answer" in output
    for kind in ("http_429", "http_503", "cut", "timeout"):
        assert kind in output


def test_a_run_without_a_success_exits_with_1(tmp_path: Path) -> None:
    with chat_server(lambda body, number: Reply(status=503)) as server:
        code, output = run(
            "--target",
            server.url,
            "--prompts",
            prompts(tmp_path),
            "--rate",
            "inf",
            "--out",
            str(tmp_path / "out"),
        )

    assert code == 1
    assert "no request succeeded" in output


def test_wrong_options_are_named_before_anything_is_sent(tmp_path: Path) -> None:
    work = prompts(tmp_path)
    with chat_server(reply) as server:
        right = ["--target", server.url, "--prompts", work, "--rate", "9"]
        right += ["--out", str(tmp_path / "out")]
        for extra, problem in (
            (["--model-name", "other"], "--model-name 'other'"),
            (["--slo", "ttft=1"], "--slo 'ttft=1': '1' is not a duration"),
            (["--slo", "ttft=0s"], "--slo 'ttft=0s': the time must be above 0"),
            (["--extra-body", "[1]"], "--extra-body '[1]' is not a JSON object"),
            (["--extra-body", "{"], "--extra-body '{' is not JSON"),
            (["--prompts", "none"], "'none' is neither"),
            (["--arrivals", "none.csv"], "none.csv cannot be read"),
            (["--no-fork"], "--no-fork"),
            (["--target", f"127.0.0.1:{free_port()}"], "cannot be reached"),
        ):
            code, output = run(*right, *extra)
            assert code == 1, output
            assert problem in output
            assert server.bodies == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--prompts", "held-out"), "give one of --concurrency, --rate and --arrivals"),
        (("--prompts", "held-out", "--rate", "1", "--concurrency", "1"), "give one of"),
        (("--prompts", "held-out", "--rate", "0"), "Invalid value for '--rate': 0 is not above 0"),
        (
            ("--prompts", "held-out", "--rate", "nan"),
            "Invalid value for '--rate': nan is not above 0",
        ),
        (("--prompts", "held-out", "--concurrency", "1", "--cv", "2"), "--cv is only for --rate"),
        (
            ("--prompts", "held-out", "--rate", "inf", "--cv", "2"),
            "Invalid value for '--rate': inf cannot be combined with --cv or --arrivals",
        ),
        (
            ("--prompts", "held-out", "--rate", "inf", "--arrivals", "a"),
            "Invalid value for '--rate': inf cannot be combined with --cv or --arrivals",
        ),
        (
            ("--prompts", "held-out", "--rate", "1", "--cv", "inf"),
            "Invalid value for '--cv': inf is not a finite number",
        ),
        (
            ("--prompts", "held-out", "--rate", "1", "--temperature", "inf"),
            "Invalid value for '--temperature': inf is not a finite number",
        ),
        (("--rate", "1"), "give either --prompts or --replay"),
        (("--rate", "1", "--prompts", "p", "--replay", "r"), "give either --prompts or --replay"),
        (("--rate", "1", "--timeout", "5"), "'5' is not a duration: write a number and a unit"),
    ],
)
def test_workload_and_load_are_given_once(options: tuple[str, ...], problem: str) -> None:
    code, output = run("--target", "127.0.0.1:1", *options)

    assert code == 2
    assert problem in output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--concurrency", "2"), "2 concurrent requests"),
        (("--rate", "1000"), "1000 per second"),
        (("--rate", "1000", "--cv", "2"), "1000 per second, coefficient of variation 2"),
        (("--rate", "inf"), "all at once"),
        (("--arrivals", "{times}"), "at the times in {times}"),
        (("--arrivals", "{times}", "--rate", "1000"), "at the times in {times}, scaled to 1000"),
    ],
)
def test_each_load_sends_all_requests_and_is_reported(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    times = tmp_path / "times.txt"
    times.write_text("1\n1.01\n1.02\n")
    given = [each.format(times=times) for each in options]
    with chat_server(reply) as server:
        code, output = run(
            "--target", server.url, "--prompts", prompts(tmp_path, 3), *given,
            "--out", str(tmp_path / "out"),
        )  # fmt: skip

    assert code == 0, output
    assert len(lines(tmp_path / "out")) == 3
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["facts"]["Arrivals"].startswith(words.format(times=times))


def test_the_default_folder_is_a_new_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with chat_server(reply) as server:
        for _ in range(2):
            code, output = run(
                "--target", server.url, "--prompts", prompts(tmp_path, 1), "--rate", "inf"
            )
            assert code == 0, output

    first, second = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert re.fullmatch(r"loadtest-\d{4}-\d\d-\d\d", first)
    assert second == f"{first}-2"


def test_metrics_that_cannot_be_read_end_the_run_after_the_warm_up(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with chat_server(reply) as server:
        code, output = run(
            "--target", server.url, "--prompts", prompts(tmp_path), "--rate", "9", "--warm-up", "2",
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
            "--target",
            server.url,
            "--prompts",
            prompts(tmp_path),
            "--rate",
            "9",
            "--out",
            str(tmp_path),
        )

    assert code == 1
    assert "already contains a run" in output


def test_a_folder_without_a_run_cannot_be_compared(tmp_path: Path) -> None:
    code, output = apar_command.run("loadtest", "compare", str(tmp_path), str(tmp_path))

    assert code == 1
    assert "contains no run of apar loadtest" in output


def test_ctrl_c_ends_a_run_early_and_reports_it(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def script(body: dict[str, Any], number: int) -> Reply:
        return reply(body, number) if number < 4 else Reply(ending="hang")

    with chat_server(script) as server:
        process = subprocess.Popen(
            [*APAR, "loadtest", "run", "--target", server.url, "--prompts",
             prompts(tmp_path, 9), "--out", str(out), "--concurrency", "3", "--warm-up", "0"],
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
