"""The options of `apar plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.config.model import PRESETS
from cluster.sizing.fork_profiles import PROFILES
from cluster.sizing.gpus import GPUS

_LOAD, _GOALS, _MODEL = "Load", "Goals, held by 99 of 100 requests", "Model"
_GPU, _TIME, _OUTPUT = "GPU", "Step time", "Output"
_POSITIVE = 1e-9

Rate = Annotated[
    float | None,
    typer.Option(min=_POSITIVE, help="Requests per second.", rich_help_panel=_LOAD),
]
Users = Annotated[
    int | None,
    typer.Option(min=1, help="Instead: users who each wait for an answer.", rich_help_panel=_LOAD),
]
ThinkTime = Annotated[
    float,
    typer.Option(min=0, help="Seconds that a user thinks after it.", rich_help_panel=_LOAD),
]
PromptTokens = Annotated[
    float, typer.Option(min=1, help="Mean length of a prompt.", rich_help_panel=_LOAD)
]
AnswerTokens = Annotated[
    float, typer.Option(min=1, help="Mean length of an answer.", rich_help_panel=_LOAD)
]
Forks = Annotated[
    str,
    typer.Option(help=f"How answers fork: {', '.join(PROFILES)}.", rich_help_panel=_LOAD),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Instead of lengths: recorded requests, JSON lines with `prompt` and `response`.",
        rich_help_panel=_LOAD,
    ),
]
FirstToken = Annotated[
    float | None,
    typer.Option(min=_POSITIVE, help="Seconds to the first token.", rich_help_panel=_GOALS),
]
TokenTime = Annotated[
    float | None,
    typer.Option(min=_POSITIVE, help="Milliseconds per token of a thread.", rich_help_panel=_GOALS),
]
Latency = Annotated[
    float | None,
    typer.Option(min=_POSITIVE, help="Seconds for a whole answer.", rich_help_panel=_GOALS),
]
Headroom = Annotated[
    float,
    typer.Option(min=0, help="Share by which the load may grow.", rich_help_panel=_GOALS),
]
Utilization = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=0.99,
        help="Most of a full replica's rate (with users: of its places) to plan for.",
        rich_help_panel=_GOALS,
    ),
]
Spare = Annotated[
    int,
    typer.Option(min=0, help="Replicas that may be away, as in a rollout.", rich_help_panel=_GOALS),
]
Model = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(PRESETS)}, a checkpoint's folder, a config.json or a hub name.",
        rich_help_panel=_MODEL,
    ),
]
Parameters = Annotated[
    float | None,
    typer.Option(
        min=_POSITIVE,
        help="Billions of them; with --layers, --kv-heads and --head-dim no file is needed.",
        rich_help_panel=_MODEL,
    ),
]
Layers = Annotated[int | None, typer.Option(min=1, rich_help_panel=_MODEL)]
KvHeads = Annotated[int | None, typer.Option(min=1, rich_help_panel=_MODEL)]
HeadDim = Annotated[int | None, typer.Option(min=1, rich_help_panel=_MODEL)]
Dtype = Annotated[
    str | None,
    typer.Option(help="Of the weights; the configuration's when absent.", rich_help_panel=_MODEL),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Context; the model's own when absent.", rich_help_panel=_MODEL),
]
GpuName = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(GPUS)}, another name, or cpu.", rich_help_panel=_GPU),
]
GpuMemory = Annotated[
    float | None, typer.Option(min=_POSITIVE, help="Of one GPU.", rich_help_panel=_GPU)
]
GpuBandwidth = Annotated[
    float | None, typer.Option(min=_POSITIVE, help="Of its memory.", rich_help_panel=_GPU)
]
GpuTflops = Annotated[
    float | None, typer.Option(min=_POSITIVE, help="Dense, 16 bit.", rich_help_panel=_GPU)
]
GpuUtilization = Annotated[
    float,
    typer.Option(min=0.01, max=1, help="vLLM's share of a GPU's memory.", rich_help_panel=_GPU),
]
TensorParallel = Annotated[
    int, typer.Option(min=1, help="GPUs of one replica.", rich_help_panel=_GPU)
]
KvCacheGib = Annotated[
    float | None,
    typer.Option(min=_POSITIVE, help="On cpu: KV cache of a replica.", rich_help_panel=_GPU),
]
BlockSize = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of a KV block: 16, on cpu 32.", rich_help_panel=_GPU),
]
StepBase = Annotated[
    float | None,
    typer.Option(min=0, help="Measured step time with no threads.", rich_help_panel=_TIME),
]
StepThread = Annotated[
    float | None,
    typer.Option(min=0, help="More for each thread, what it reads included.",
                 rich_help_panel=_TIME),
]  # fmt: skip
StepPrompt = Annotated[
    float, typer.Option(min=0, help="More for each prompt token.", rich_help_panel=_TIME)
]
MeasureFrom = Annotated[
    str | None,
    typer.Option(
        help="Measure it on a running cluster: its metrics page, while its load changes.",
        rich_help_panel=_TIME,
    ),
]
MeasureSeconds = Annotated[float, typer.Option(min=1, help="For so long.", rich_help_panel=_TIME)]
MinReplicas = Annotated[
    int | None,
    typer.Option(min=1, help="Let the autoscaler go down to so many.", rich_help_panel=_OUTPUT),
]
Out = Annotated[
    Path | None, typer.Option(help="Write the YAML there too.", rich_help_panel=_OUTPUT)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON; for scripts.", rich_help_panel=_OUTPUT)
]
