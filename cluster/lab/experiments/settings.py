"""Settings of an experiment, and the runs that it needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from apar_core.errors import StepCostsError
from apar_core.installation import processor_name
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.files import read_costs
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import kv_tokens, step_costs
from apar_core.suggestions import did_you_mean
from cluster.lab.experiments.methods import ADAPTIVE, EAGER, METHODS, PEER_METHODS, SEQUENTIAL

Engine = Literal["virtual", "real"]
STRUCTURED, MIXED = "structured", "mixed"
FIGURE_5A, FIGURE_5B, PEERS = "fig5a", "fig5b", "peers"
FIGURE_METHODS = (SEQUENTIAL, EAGER, ADAPTIVE)

# The paper's limits on concurrent requests, for its 7B and 13B models (appendix C.2).
SMALL_MODEL_REQUESTS, LARGE_MODEL_REQUESTS = 350, 180
_LARGE_MODEL_PARAMETERS = 10e9


def _known_gpus(names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(find_gpu(name).name for name in names))
    except StepCostsError as error:
        raise ValueError(str(error)) from error


def _check_shares(shares: tuple[float, ...]) -> tuple[float, ...]:
    for share in shares:
        if share > 1:
            raise ValueError(f"a share of the KV cache is at most 1, not {share}")
    return shares


GpuNames = Annotated[tuple[str, ...], AfterValidator(_known_gpus)]
"""Full names of GPUs, each once; short names are accepted."""
KvShares = Annotated[tuple[PositiveFloat, ...], AfterValidator(_check_shares)]
"""Shares of the KV cache, at most 1."""


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


class ExperimentSettings(BaseModel):
    """Models, devices, workload, limits, methods, and the points of the figures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Engine = "virtual"
    models: tuple[str, ...] = Field(("llama-7b",), min_length=1)
    gpus: GpuNames = Field(("a100-80gb",), min_length=1)
    tensor_parallel: PositiveInt = 1
    costs: Path | None = Field(None, description="Step costs of a calibration.")
    trace: Path = Field(description="Answers that fork: figure 5 and the tables.")
    mixed_trace: Path | None = Field(None, description="Answers in their natural mix.")
    answers: PositiveInt = Field(1000, description="Requests per run; a shorter trace is repeated.")
    max_tokens: PositiveInt = Field(
        2048, description="Answers that are longer than this, prompt included, are left out."
    )
    seed: int = Field(0, description="Seed for sampling answers of a longer trace.")
    kv_tokens: PositiveInt | None = Field(
        None, description="Tokens of the whole KV cache; by default what the GPU's memory holds."
    )
    block_size: PositiveInt = Field(16, description="Tokens of a KV block.")
    max_requests: PositiveInt | None = Field(
        None, description="Maximum concurrent requests; by default the paper's 350 or 180."
    )
    kv_shares: KvShares = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
    concurrencies: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 180, 256, 350)
    methods: tuple[str, ...] = FIGURE_METHODS
    peer_methods: tuple[str, ...] = PEER_METHODS
    peer_shares: KvShares = (0.3, 0.9)
    rounds: PositiveInt = Field(1, description="Runs per point, for real engines.")
    sample_s: PositiveFloat = 3.0
    token_time_multiple: PositiveFloat = Field(
        2.0,
        description="Time per token of the adaptive policy, in mean steps of sequential decoding.",
    )
    growth_reserve_tokens: NonNegativeInt = Field(
        8,
        description="Reserve per running thread, as in ForkSettings, for methods that have one.",
    )
    is_async: bool = Field(True, description="Schedule ahead, as vLLM does on GPUs.")
    engine_args: Mapping[str, Any] = Field({}, description="Arguments of a real vLLM engine.")

    @field_validator("methods", "peer_methods")
    @classmethod
    def _check_methods(cls, methods: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        unknown = [method for method in methods if method not in METHODS]
        if unknown:
            raise ValueError(
                f"unknown method {', '.join(unknown)}: known are {', '.join(METHODS)}"
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
        if not self.is_virtual:
            return SMALL_MODEL_REQUESTS
        is_large = find_model(model).parameters > _LARGE_MODEL_PARAMETERS
        return LARGE_MODEL_REQUESTS if is_large else SMALL_MODEL_REQUESTS

    def virtual_device(self, model: str, device: str) -> tuple[StepCosts, int]:
        """Return the step costs of a model on a device, and the KV blocks of its whole cache.

        The cache is sized for the GPU, also with given costs, unless `kv_tokens` is set.
        """
        size, gpu = find_model(model), find_gpu(device if self.costs is None else self.gpus[0])
        if self.costs is not None:
            costs = read_costs(self.costs)
        else:
            costs = step_costs(size, gpu, self.tensor_parallel, self.block_size)
        num_tokens = self.kv_tokens or kv_tokens(
            size, gpu, self.tensor_parallel, block_size=self.block_size
        )
        return costs, num_tokens // self.block_size

    def as_text(self) -> dict[str, str]:
        """Return the settings that all runs of a folder share, to compare with earlier ones.

        Models, devices, methods and points are in the keys of runs: a folder may get more of them.
        """
        own = {
            "models", "gpus", "tensor_parallel", "max_requests", "kv_shares", "concurrencies",
            "methods", "peer_methods", "peer_shares", "rounds", "trace", "mixed_trace", "costs",
        }  # fmt: skip
        values = {k: str(v) for k, v in self.model_dump(mode="json", exclude=own).items()}
        for name, path in self.traces.items():
            values[f"{name}_trace_sha256"] = file_digest(path)
        if self.costs is not None:
            values["costs_sha256"] = file_digest(self.costs)
        return values


def keys_of(experiments: tuple[str, ...], settings: ExperimentSettings) -> list[RunKey]:
    """Return the runs that experiments need, without duplicates, in the order of reports."""
    return list(dict.fromkeys(_keys(experiments, settings)))


def _keys(experiments: tuple[str, ...], settings: ExperimentSettings) -> Iterator[RunKey]:
    for model in settings.models:
        limit = settings.limit(model)
        for device in settings.devices:
            for number in range(settings.rounds):
                base = RunKey(
                    model=model,
                    device=device,
                    tensor_parallel=settings.tensor_parallel,
                    concurrency=limit,
                    round=number,
                )
                for experiment in experiments:
                    for point, methods in _points(experiment, base, settings):
                        yield from map(point.of_method, methods)


def _points(
    experiment: str, base: RunKey, settings: ExperimentSettings
) -> Iterator[tuple[RunKey, tuple[str, ...]]]:
    if experiment == FIGURE_5B:
        # The largest share of figure 5a.
        share = max(settings.kv_shares)
        for concurrency in settings.concurrencies:
            if concurrency <= base.concurrency:
                place = {
                    "kv_share": share,
                    "concurrency": concurrency,
                    "is_closed_loop": True,
                }
                yield base.model_copy(update=place), settings.methods
        return
    is_peers = experiment == PEERS
    for trace in settings.traces:
        for share in settings.peer_shares if is_peers else settings.kv_shares:
            point = base.model_copy(update={"trace": trace, "kv_share": share})
            yield point, settings.peer_methods if is_peers else settings.methods


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex; "absent" if the file does not exist."""
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
