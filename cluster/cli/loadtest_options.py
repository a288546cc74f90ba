"""The options of `apar loadtest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TargetUrl = Annotated[
    str | None, typer.Option("--target", help="The server, such as http://127.0.0.1:8000.")
]
Workload = Annotated[
    str | None,
    typer.Option(
        help="replay:TRACE.jsonl (recorded answers, generated again; the server's model needs "
        "replay: true), or prompts:NAME with vicuna-bench, mt-bench, held-out, a file of JSON "
        "lines with a prompt each (a trace is one), or a .txt file with a prompt a line."
    ),
]
ArrivalsSpec = Annotated[
    str,
    typer.Option(
        "--arrivals",
        help="all (at once), closed:N (N at any time), poisson:RATE, gamma:RATE,cv=CV (bursts), or "
        "trace:FILE[,rate=RATE] (recorded times). Rates are requests a second.",
    ),
]
Flat = Annotated[bool, typer.Option("--flat", help="Replay the same tokens without forks.")]
Requests = Annotated[
    int | None,
    typer.Option(min=1, help="How many in each repeat; all of the workload unless given."),
]
LongestS = Annotated[
    float | None,
    typer.Option("--duration", min=0.1, help="Send nothing more after so many seconds."),
]
Repeats = Annotated[
    int, typer.Option(min=1, help="The same again; three or more for intervals over repeats.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="As the server calls it; its only one by default.")
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Of a replay: the model's checkpoint; the server says where it can."),
]
ContextTokens = Annotated[
    int | None,
    typer.Option(
        "--context", min=1, help="Leave out longer recorded answers; the model's length by default."
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Of an answer to a plain prompt.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Of answers to plain prompts.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Answers to plain prompts of exactly --max-tokens.")
]
ExtraBody = Annotated[
    str | None, typer.Option(help="JSON object to add to every request's body.", metavar="JSON")
]
Questions = Annotated[
    Path | None,
    typer.Option(help="Folder of FastChat's files, for a benchmark's prompts.", file_okay=False),
]
Slo = Annotated[
    str | None,
    typer.Option(help="Objectives for goodput, such as ttft=2s,tpot=50ms,e2e=30s; also path and "
                 "paragraph."),
]  # fmt: skip
Metrics = Annotated[
    list[str] | None,
    typer.Option(help="Metrics page of the cluster (or a list of pages), as of apar monitor."),
]
SampleS = Annotated[
    float, typer.Option("--sample-s", min=0.1, help="Length of a sample of throughput, seconds.")
]
SettleS = Annotated[
    float,
    typer.Option(
        "--settle-s",
        min=0.0,
        help="With --metrics: a repeat's counts are final when nothing has been added for so many "
        "seconds; more than the cluster's metrics.report_s.",
    ),
]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.1, help="Longest request, seconds.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Requests sent before, at once, and forgotten.")]
Seed = Annotated[int, typer.Option(help="Of random arrivals; each repeat has its own.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the run; out/loadtest/TIME by default.", file_okay=False),
]
SaveAnswers = Annotated[
    Path | None,
    typer.Option(help="Record the answers there, as a trace for replay:FILE.", dir_okay=False),
]
