"""Settings of experiments, which are also their commands' options, and the runs of figures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FilePath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from apar_core.installation import processor_name
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import read_costs
from apar_core.step_costs.models import find_model
from apar_core.suggestions import did_you_mean
from cluster.lab.experiments.methods import ADAPTIVE, EAGER, METHODS, PEER_METHODS, SEQUENTIAL
from cluster.lab.settings import (
    GpuName,
    GpuNames,
    KnownModel,
    ModelOnGpu,
    Settings,
    file_digest,
    known_model,
)
from deployments.config.model import PRESETS, model_path

STRUCTURED, MIXED = "structured", "mixed"
FIGURE_5A, FIGURE_5B, PEERS = "fig5a", "fig5b", "peers"
FIGURE_METHODS = (SEQUENTIAL, EAGER, ADAPTIVE)

# The paper's limits on concurrent requests, for its 7B and 13B models (appendix C.2).
SMALL_MODEL_REQUESTS, LARGE_MODEL_REQUESTS = 350, 180
_LARGE_MODEL_PARAMETERS = 10e9
# Two minutes on two cores.
_QUICK: dict[str, Any] = {
    "answers": 200,
    "kv_shares": (0.1, 0.5, 0.9),
    "concurrencies": (1, 8, 64),
    "peer_shares": (0.5,),
}

TRACE = "Recorded answers: JSON lines with `prompt` and `response`."
MIXED_TRACE = "Recorded answers in their natural mix."
MODEL = f"Preset ({', '.join(PRESETS)}), checkpoint folder or Hugging Face name."
ENGINE_ARGS = "Further vLLM arguments of a real engine, as a JSON object."
KV_SHARES = "Shares of the KV cache to run with."
CONTEXT_LENGTH = "Leave out answers longer than this with their prompt (tokens)."


def _check_share(share: float) -> float:
    if share > 1:
        raise ValueError(f"a share of the KV cache is at most 1, not {share}")
    return share


def _read_engine_arguments(given: Any) -> Any:
    """Read vLLM's engine arguments from a JSON text, and refuse unknown ones."""
    if not isinstance(given, str):
        return given
    try:
        arguments = json.loads(given)
    except ValueError as error:
        raise ValueError(f"{given!r} is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{given!r} is not a JSON object")
    # Importing vLLM takes seconds.
    from apar_core.vllm_names import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            raise ValueError(f"vLLM has no engine argument {name!r}{did_you_mean(name, known)}")
    return arguments


def _ascending(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


KvShare = Annotated[PositiveFloat, AfterValidator(_check_share)]
"""A share of the KV cache, at most 1."""
Ascending = Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)]
"""Numbers, each once."""
EngineArguments = Annotated[Mapping[str, Any], BeforeValidator(_read_engine_arguments)]


class RunKey(BaseModel):
    """Identity of a run.

    device: a GPU's name, or the machine on which a real engine ran.
    concurrency: maximum number of concurrent requests. All others wait in a queue from the start;
        in a closed loop, each answer is followed by the next request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    device: str
    tensor_parallel: PositiveInt = 1
    trace: str = STRUCTURED
    method: str = SEQUENTIAL
    kv_share: float = 1.0
    concurrency: PositiveInt
    is_closed_loop: bool = False
    round: int = 0

    def of_method(self, method: str) -> RunKey:
        """Return the run of another method under the same conditions."""
        return self.model_copy(update={"method": method})

    @property
    def title(self) -> str:
        """Short description of the run, for progress output."""
        place = f"{self.concurrency} at once" if self.is_closed_loop else f"{self.kv_share:g} of KV"
        return f"{self.model} on {self.device}, {self.trace}, {place}, {self.method}"


def limit_of(model: str) -> int:
    """Return the paper's limit on the concurrent requests of a model of this size."""
    is_large = find_model(model).parameters > _LARGE_MODEL_PARAMETERS
    return LARGE_MODEL_REQUESTS if is_large else SMALL_MODEL_REQUESTS


class ExperimentSettings(Settings):
    """Models, devices, workload, limits, methods, and the points of the figures."""

    engine: Literal["virtual", "real"] = "virtual"
    """virtual: predict the times on --gpu; real: run --model on this machine."""
    models: tuple[str, ...] = Field(("llama-7b",), min_length=1)
    """Models: llama-7b, llama-13b, llama-3-8b, llama-3-70b, a preset, a checkpoint folder or a
    config.json.
    """
    gpus: GpuNames = Field(("a100-80gb",), min_length=1)
    """GPUs to predict for, such as a100-80gb, h100, h200, l40s, l4."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    costs: FilePath | None = None
    """Step costs from `apar experiment calibrate`, in place of predicted ones."""
    trace: Path = Field(description=TRACE)
    mixed_trace: Path | None = Field(None, description=MIXED_TRACE)
    quick: bool = False
    """Few answers and points: takes two minutes."""
    answers: PositiveInt = 1000
    """Number of requests: a trace with fewer answers is repeated, one with more sampled."""
    max_tokens: PositiveInt = Field(2048, description=CONTEXT_LENGTH)
    seed: NonNegativeInt = 0
    """Random seed."""
    kv_tokens: PositiveInt | None = None
    """Tokens of the whole KV cache."""
    block_size: PositiveInt = 16
    """Tokens per KV-cache block."""
    max_requests: PositiveInt | None = None
    """Limit on concurrent requests."""
    kv_shares: tuple[KvShare, ...] = Field((0.1, 0.2, 0.3, 0.5, 0.7, 0.9), description=KV_SHARES)
    concurrencies: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 180, 256, 350)
    """Numbers of concurrent requests in figure 5b, up to --max-requests."""
    methods: tuple[str, ...] = Field(
        FIGURE_METHODS,
        description=f"Methods to compare: {', '.join(METHODS)}.",
        examples=list(METHODS),
    )
    peer_methods: tuple[str, ...] = PEER_METHODS
    peer_shares: tuple[KvShare, ...] = (0.3, 0.9)
    rounds: PositiveInt = 1
    """Repeats of each run of a real engine; medians are compared."""
    sample_s: PositiveFloat = 3.0
    """Time between samples."""
    token_time_multiple: PositiveFloat = 2.0
    """Time per token that the adaptive policy keeps to, in mean steps of sequential decoding."""
    growth_reserve_tokens: NonNegativeInt = 8
    """KV cache that our methods keep free for each running thread (tokens)."""
    is_async: bool = True
    """Schedule ahead in virtual time, as vLLM does on GPUs."""
    engine_args: EngineArguments = Field({}, description=ENGINE_ARGS)

    @model_validator(mode="before")
    @classmethod
    def _apply_given(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Give shares and methods to the peers too, and fewer points to a quick run."""
        given = {**(_QUICK if values.get("quick") else {}), **values}
        for name, own in (("peer_shares", "kv_shares"), ("peer_methods", "methods")):
            if own in values and name not in values:
                given[name] = values[own]
        return given

    @field_validator("methods", "peer_methods")
    @classmethod
    def _check_methods(cls, methods: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        unknown = [method for method in methods if method not in METHODS]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is not one of {', '.join(METHODS)}"
                f"{did_you_mean(unknown[0], METHODS)}"
            )
        if SEQUENTIAL not in methods:
            raise ValueError(f"{SEQUENTIAL} must be among the methods: all are compared with it")
        if info.data.get("engine") == "real":
            for method in methods:
                if METHODS[method].parallel_format is not None:
                    raise ValueError(f"{method} can only be predicted: use engine virtual")
        return tuple(name for name in METHODS if name in methods)

    @field_validator("costs")
    @classmethod
    def _check_costs(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        given = [len(info.data.get(name, ())) for name in ("models", "gpus")]
        if path is not None and max(given) > 1:
            raise ValueError(
                f"{path} describes one model on one device: give one model and one GPU"
            )
        return path

    @property
    def is_virtual(self) -> bool:
        """Whether runs are predicted in virtual time."""
        return self.engine == "virtual"

    @property
    def traces(self) -> Mapping[str, Path]:
        """The traces by their names."""
        if self.mixed_trace is None:
            return {STRUCTURED: self.trace}
        return {STRUCTURED: self.trace, MIXED: self.mixed_trace}

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the GPUs, of the device that the given costs describe, or of this machine."""
        if not self.is_virtual:
            return (machine_name(),)
        return self.gpus if self.costs is None else (read_costs(self.costs).name,)

    def origin(self, device: str) -> str:
        """Say whether times are predicted for a device or measured on it."""
        return f"predicted for {device}" if self.is_virtual else f"measured on {device}"

    def limit(self, model: str) -> int:
        """Return the maximum number of concurrent requests of a model."""
        if self.max_requests is not None:
            return self.max_requests
        return limit_of(model) if self.is_virtual else SMALL_MODEL_REQUESTS

    def virtual_device(self, model: str, device: str) -> tuple[StepCosts, int]:
        """Return the step costs of a model on a device, and the KV blocks of its whole cache.

        The cache is sized for the GPU, also with given costs, unless `kv_tokens` is set.
        """
        gpu = device if self.costs is None else self.gpus[0]
        predicted = ModelOnGpu(model, gpu, self.tensor_parallel, self.block_size)
        costs = predicted.costs if self.costs is None else read_costs(self.costs)
        return costs, (self.kv_tokens or predicted.kv_tokens) // self.block_size

    def as_text(self) -> dict[str, str]:
        """Return the settings that all runs of a folder share, to compare with earlier ones.

        Models, devices, methods and points are in the keys of runs: a folder may get more of them.
        """
        own = {
            "models", "gpus", "tensor_parallel", "max_requests", "kv_shares", "concurrencies",
            "methods", "peer_methods", "peer_shares", "rounds", "trace", "mixed_trace", "costs",
            "quick",
        }  # fmt: skip
        values = {k: str(v) for k, v in self.model_dump(mode="json", exclude=own).items()}
        for name, path in self.traces.items():
            values[f"{name}_trace_sha256"] = file_digest(path)
        if self.costs is not None:
            values["costs_sha256"] = file_digest(self.costs)
        return values


def keys_of(experiments: tuple[str, ...], settings: ExperimentSettings) -> list[RunKey]:
    """Return the runs that experiments need, without duplicates, in the order of reports."""
    keys = (
        point.of_method(method)
        for model in settings.models
        for device in settings.devices
        for number in range(settings.rounds)
        for experiment in experiments
        for point, methods in _points(
            experiment,
            RunKey(
                model=model,
                device=device,
                tensor_parallel=settings.tensor_parallel,
                concurrency=settings.limit(model),
                round=number,
            ),
            settings,
        )
        for method in methods
    )
    return list(dict.fromkeys(keys))


def _points(
    experiment: str, base: RunKey, settings: ExperimentSettings
) -> Iterator[tuple[RunKey, tuple[str, ...]]]:
    if experiment == FIGURE_5B:
        # The largest share of figure 5a.
        share = max(settings.kv_shares)
        for concurrency in settings.concurrencies:
            if concurrency <= base.concurrency:
                place = {"kv_share": share, "concurrency": concurrency, "is_closed_loop": True}
                yield base.model_copy(update=place), settings.methods
        return
    is_peers = experiment == PEERS
    for trace in settings.traces:
        for share in settings.peer_shares if is_peers else settings.kv_shares:
            point = base.model_copy(update={"trace": trace, "kv_share": share})
            yield point, settings.peer_methods if is_peers else settings.methods


class FamilyAttentionSettings(ExperimentSettings):
    """Models, GPUs, load and points of `apar experiment family-attention`, in virtual time.

    A model on several GPUs is NAME:GPUS. closed_kv_tokens: tokens of KV cache in closed loops, on
    engines with at least as many. system_share: share of the KV cache with a system prompt.
    """

    models: tuple[str, ...] = Field(
        ("llama-7b", "llama-13b", "llama-3-8b", "llama-3-70b:4"), min_length=1
    )
    """Models, those on several GPUs as NAME:GPUS."""
    gpus: GpuNames = Field(("a100-80gb", "h100", "h200"), min_length=1)
    """GPUs to predict for."""
    kv_shares: tuple[KvShare, ...] = Field(
        (0.1, 0.3, 0.5, 0.9), min_length=1, description=KV_SHARES
    )
    concurrencies: tuple[PositiveInt, ...] = (1, 8, 32, 128, 350)
    """Numbers of concurrent requests in closed loops."""
    closed_kv_tokens: PositiveInt = 98_304
    system_tokens: NonNegativeInt = 512
    """Length of a system prompt that requests share (tokens)."""
    system_share: KvShare = 0.3

    @field_validator("models")
    @classmethod
    def _check_models(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            size, colon, number = name.partition(":")
            if colon and not (number.isdecimal() and int(number) > 0):
                raise ValueError(f"{name!r}: the number of GPUs after ':' must be 1 or more")
            known_model(size)
        return names

    def limit(self, model: str) -> int:
        """Return the maximum number of concurrent requests of a model."""
        if self.max_requests is not None:
            return self.max_requests
        return LARGE_MODEL_REQUESTS if model.endswith("13b") else SMALL_MODEL_REQUESTS

    def as_text(self) -> dict[str, str]:
        """Return the settings that all runs of a folder share; points may be added."""
        own = ("answers", "growth_reserve_tokens", "max_tokens", "seed")
        # Only of the forking trace: the mixed trace may be added.
        digest = {"trace_sha256": file_digest(self.trace), "block_size": str(self.block_size)}
        return {name: str(getattr(self, name)) for name in own} | digest


class JoinSettings(Settings):
    """Load and device of `apar experiment joins`."""

    points: ClassVar = frozenset({"concurrency", "round_trips_ms"})

    trace: Path | None = None
    """Recorded answers, one JSON object per line, with prompt and response (default: those of the
    embedded model's corpus).
    """
    model: KnownModel = "llama-7b"
    """Model to predict for."""
    gpu: GpuName = "a100-80gb"
    """GPU to predict for."""
    concurrency: tuple[PositiveInt, ...] = (1, 8, 32, 128)
    """Numbers of concurrent requests."""
    round_trips_ms: tuple[NonNegativeFloat, ...] = (0.0, 10.0)
    """Times between the end of a client's request and the start of its next (ms)."""
    answers: PositiveInt = 512
    """Maximum number of answers."""
    max_tokens: PositiveInt = 2048
    kv_share: float = Field(0.9, ge=0.01, le=1)
    """Share of the KV cache to run with."""
    seed: NonNegativeInt = 0
    """Random seed."""


class SchedulerCostSettings(Settings):
    """Load of `apar experiment scheduler-cost`."""

    points: ClassVar = frozenset({"repeats"})

    trace: Path = Field(description=TRACE)
    model: KnownModel = "llama-7b"
    """Model whose KV cache the engines have."""
    gpu: GpuName = "a100-80gb"
    """GPU whose memory they have."""
    answers: PositiveInt = 948
    """Number of answers; a shorter trace is repeated."""
    concurrency: PositiveInt = 350
    """Number of concurrent requests."""
    kv_share: float = Field(0.9, ge=0.01, le=1)
    """Share of the KV cache to run with."""
    streams: bool = False
    """Stream text and count statistics as a server does, instead of returning token ids at the end.
    """
    repeats: PositiveInt = 3
    """Repeats of each run; a later run with more adds the missing ones."""


class ScaleOutSettings(Settings):
    """The model, its replicas, and the load on them."""

    trace: Path = Field(description=TRACE)
    model: str = Field("apar-tiny", description=MODEL, examples=list(PRESETS))
    replicas: tuple[PositiveInt, ...] = Field((1, 2), min_length=1)
    """Numbers of replicas to serve with."""
    answers: PositiveInt = 96
    """Number of answers per repeat."""
    concurrency: PositiveInt = 32
    """Number of concurrent requests."""
    repeats: PositiveInt = 3
    """Repeats of the load."""


class MeasuredEngine(Settings):
    """A real engine whose steps are measured, and the number of repeats."""

    points: ClassVar = frozenset({"repeats", "random_weights"})

    model: str = Field("apar-tiny", description=MODEL, examples=list(PRESETS))
    repeats: PositiveInt = 3
    random_weights: str | None = None
    """Dimensions of a model that gets random weights, in place of --model: llama-7b, llama-13b,
    llama-3-8b, or a config.json. Step times do not depend on the weights.
    """
    engine: EngineArguments = Field({}, description=ENGINE_ARGS)

    def with_weights(self, folder: Path) -> Self:
        """Return settings with a model of random weights, written to the folder, if they ask."""
        if self.random_weights is None:
            return self
        from cluster.lab.experiments.random_model import write_random_model

        model = write_random_model(self.random_weights, folder / "model")
        engine = {"load_format": "dummy", **self.engine}
        return self.model_copy(
            update={"model": str(model), "engine": engine, "random_weights": None}
        )


class Grid(MeasuredEngine):
    """The steps to measure, and the engine that runs them.

    prefill: tokens of a prompt that is computed in the same step as the rows.
    """

    rows: Ascending = (1, 2, 4, 8, 16, 32, 64, 128)
    """Numbers of rows (threads per step), two or more."""
    contexts: Ascending = Field((64, 256, 1024), min_length=1)
    """Tokens that each row attends to."""
    prefill: Ascending = (16, 64, 256, 1024)
    """Tokens of a prompt that is computed beside the rows."""
    steps: int = Field(12, ge=2)
    """Decoding steps at each point and repeat."""
    repeats: PositiveInt = 3
    """Passes over the grid; a later run with more adds them."""

    @field_validator("rows")
    @classmethod
    def _check_rows(cls, rows: tuple[int, ...]) -> tuple[int, ...]:
        if len(rows) < 2:
            raise ValueError("give two different numbers or more")
        return rows

    @property
    def knots(self) -> list[int]:
        """Tokens per step at which the grid measures the time of matrix products."""
        return sorted({*self.rows, *self.prefill})


class ValidationSettings(MeasuredEngine):
    """The runs to measure and predict.

    limits: maximum numbers of concurrent requests. kv_shares: shares of a KV cache that holds as
    many of the longest answers as the largest limit, or of the engine's cache if that is smaller.
    """

    trace: Path = Field(description=TRACE)
    answers: PositiveInt = 32
    """Answers of a run, drawn at random."""
    max_tokens: PositiveInt = Field(600, description=CONTEXT_LENGTH)
    limits: Ascending = Field((2, 8), min_length=1)
    """Limits on concurrent requests."""
    kv_shares: tuple[KvShare, ...] = Field((1.0, 0.4), min_length=1, description=KV_SHARES)
    repeats: PositiveInt = 3
    """Repeats of each run; the least time of each step counts."""

    @property
    def grid(self) -> Grid:
        """The grid of steps, with up to four rows for each request of the largest limit."""
        rows = [2**power for power in range(12) if 2**power <= 4 * max(self.limits)]
        contexts = (64, self.max_tokens // 2, self.max_tokens)
        return Grid(model=self.model, rows=tuple(rows), contexts=contexts, prefill=(16, 64, 256))

    @property
    def tokenizer(self) -> str:
        """The model's folder or name, to load its tokenizer from."""
        return model_path(self.model)

    @property
    def kv_tokens(self) -> int:
        """Tokens of the whole KV cache; a GPU's may be smaller."""
        return max(self.limits) * self.max_tokens


def machine_name() -> str:
    """Return the GPU of this machine, or its processor and number of cores."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return f"{os.cpu_count()} cores of {processor_name()}"


def closed_loop_answers(concurrency: int, available: int, least: int = 48) -> int:
    """Return how many answers a closed loop measures: fewer with few clients, which is slow.

    With four answers per client the figures settle.
    """
    return min(available, max(least, 4 * concurrency))
