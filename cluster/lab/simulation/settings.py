"""Settings of simulated clusters, which are also the options of their commands."""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    Field,
    FilePath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from apar_core.errors import EvaluationError
from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.step_costs.files import read_costs
from cluster.durations import parse_duration
from cluster.lab.settings import GpuName, KnownModel, ModelOnGpu, Settings, file_digest
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.routing import RoutingPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from apar_core.attention.settings import FamilySettings

NO_FORKS = "off"
"""Fork policy of requests that may not fork."""
ADAPTIVE, PACED = "adaptive", "paced"
LISTS, LISTS_ADAPTIVE = "lists", "lists-adaptive"
TIMES = {
    "ttft": "time to the first token",
    "certain": "time to certain token, mean over the tokens of a request",
    "tpot": "time per token as the reader sees it",
    "path": "time per step of the critical path",
    "tbt": "95th percentile of the time between two pieces of text",
    "silence": "longest time between two pieces of text",
    "e2e": "end-to-end latency",
}
"""Times of a request by their names in an SLO."""
_TOKEN_TIMES = ("tpot", "path", "tbt")
# The step of the fork token, the one scheduled before it was seen, and the child's first step.
_FORK_STEPS = 3
_IDLE_CONTEXT = 400


def _read_bounds(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    low, _, high = given.partition("-")
    if not (low.isdigit() and high.isdigit()):
        raise ValueError(f"{given!r} is not MIN-MAX, such as 2-16")
    return int(low), int(high)


Moment = Annotated[
    float,
    BeforeValidator(lambda given: parse_duration(given) if isinstance(given, str) else given),
]
"""A time since the start of a run, such as 20s."""


class Case(NamedTuple):
    """The settings in which cases of a simulation differ: one row of the result.

    load: rate over that of the initial replicas when each is saturated with eager forks.
    target_threads, catch_up_s: settings of the autoscaler; None without one or for its defaults.
    """

    replicas: int
    rate: float
    load: float | None
    router: str
    fork_policy: str
    target_threads: float | None = None
    catch_up_s: float | None = None


class ReplicaSettings(Settings):
    """Engines of a model on a GPU, and recorded answers and arrivals to load them with."""

    trace: list[FilePath]
    """Recorded answers: JSON lines with `prompt` and `response`. Repeatable."""
    model: KnownModel = "llama-7b"
    """llama-7b, llama-13b, llama-3-8b, llama-3-70b, a checkpoint folder or a config.json."""
    gpu: GpuName = "a100-80gb"
    """GPU, such as a100-80gb, h100 or l4."""
    tensor_parallel: PositiveInt = 1
    """GPUs per replica."""
    costs: FilePath | None = None
    """Step costs measured by `apar experiment calibrate`, instead of the predicted ones."""
    attention: Literal["ordinary", "family"] = "ordinary"
    """ordinary, or family: threads of a request read shared KV blocks once."""
    kv_tokens: PositiveInt | None = None
    """KV cache per replica (tokens; default: what fits beside the weights)."""
    concurrency: PositiveInt = 350
    """Limit on the running requests of a replica."""
    arrivals: FilePath | None = None
    """Recorded arrivals: a table with TIMESTAMP and ContextTokens, compressed to the rate (default:
    a Poisson process).
    """

    @cached_property
    def device(self) -> ModelOnGpu:
        """The model on the GPU."""
        return ModelOnGpu(self.model, self.gpu, self.tensor_parallel)

    @cached_property
    def step_costs(self) -> StepCosts:
        """Step costs, predicted or from the file."""
        return self.device.costs if self.costs is None else read_costs(self.costs)

    @property
    def cache_tokens(self) -> int:
        """Tokens of a replica's KV cache."""
        return self.kv_tokens or self.device.kv_tokens

    @property
    def family(self) -> FamilySettings | None:
        """Settings of family attention; None: each row reads its own KV blocks."""
        return self.device.family if self.attention == "family" else None

    def facts(self) -> dict[str, str]:
        """Return the facts of a report that name the data."""
        return {
            "Answers": ", ".join(map(str, self.trace)),
            "Arrivals": "Poisson process"
            if self.arrivals is None
            else f"{self.arrivals}, compressed to the rate, with the recorded prompt lengths",
        }


class SimulationSettings(ReplicaSettings):
    """A grid of cases and their common settings.

    first_token_s: time to first token that the adaptive policy may use. report_period_s: period of
    load reports; None: the product's. lists: engines write lists in parallel.
    """

    replicas: tuple[PositiveInt, ...] = (8,)
    """Numbers of replicas at the start."""
    router: tuple[RoutingPolicy, ...] = Field(
        (RoutingPolicy.THREADS,),
        description=f"Routing policies to compare: {', '.join(RoutingPolicy)}.",
    )
    fork_policy: tuple[Literal["eager", "adaptive", "off"], ...] = ("eager",)
    """Fork policies to compare: eager, adaptive, off."""
    token_time_s: PositiveFloat = 0.05
    """Target time per token of the adaptive fork policy."""
    gateways: PositiveInt = 1
    """Number of gateways."""
    rate: tuple[PositiveFloat, ...] = ()
    """Requests per second of the whole cluster."""
    load: tuple[PositiveFloat, ...] = (0.85,)
    """Instead of --rate: shares of the rate at which saturated replicas end requests."""
    duration_s: float = Field(60.0, ge=1)
    """Time in which requests arrive."""
    surge: float = Field(1.0, ge=0.01)
    """Multiple of the rate in the middle third of the duration."""
    seeds: PositiveInt = 1
    """Runs of each case."""
    slow: NonNegativeInt = 0
    """Number of slow replicas."""
    slowness: float = Field(2.0, ge=1)
    """Factor on their step costs."""
    kill: list[Moment] = Field([])
    """Time at which a replica dies, such as 20s. Repeatable."""
    join: list[Moment] = Field([])
    """Time at which a further replica serves. Repeatable."""
    start_delay_s: NonNegativeFloat = 60.0
    """Time that a replica takes to start."""
    autoscale: Annotated[tuple[int, int], BeforeValidator(_read_bounds)] | None = None
    """Let the number of replicas follow the load, within MIN-MAX."""
    target_threads: tuple[Annotated[float, Field(ge=1)], ...] = ()
    """With --autoscale: threads per replica to aim at."""
    catch_up: tuple[NonNegativeFloat, ...] = ()
    """With --autoscale: values of `catch_up_s` (seconds)."""
    first_token_s: float | None = None
    report_period_s: float | None = None
    lists: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.autoscale is None and (self.target_threads or self.catch_up):
            raise ValueError("--target-threads and --catch-up need --autoscale")
        if self.slow > min(self.replicas):
            raise ValueError(f"--slow: {self.slow} of {min(self.replicas)} replicas cannot be slow")
        if self.autoscale is not None:
            low, high = self.autoscale
            try:
                AutoscalingConfig(min_replicas=low, max_replicas=high)
            except ValidationError as error:
                raise ValueError(f"--autoscale: {error.errors()[0]['msg']}") from error
        return self

    def cases(self, capacity: float | None) -> list[Case]:
        """Return all cases; `capacity` is a replica's saturated rate, needed for loads."""
        cases = []
        for replicas in self.replicas:
            speed = replicas - self.slow + self.slow / self.slowness
            offered: list[tuple[float, float | None]] = [(rate, None) for rate in self.rate]
            if not self.rate:
                if capacity is None:
                    raise EvaluationError("loads need the saturated rate of a replica")
                offered = [(load * capacity * speed, load) for load in self.load]
            for (rate, load), router, policy, target, catch_up in product(
                offered,
                self.router,
                self.fork_policy,
                self.target_threads or (None,),
                self.catch_up or (None,),
            ):
                cases.append(Case(replicas, rate, load, router.value, policy, target, catch_up))
        return cases

    def stages(self, case: Case) -> list[tuple[float, float]]:
        """Return the stages (seconds, requests per second) of a case."""
        if self.surge == 1.0:
            return [(self.duration_s, case.rate)]
        third_s = self.duration_s / 3
        return [(third_s, factor * case.rate) for factor in (1.0, self.surge, 1.0)]


class Objective(NamedTuple):
    """One SLO: limits in seconds by name, and the text that it was parsed from."""

    text: str
    limits: Mapping[str, float]

    def meets(self, times: Mapping[str, float] | None) -> bool:
        """Return whether a request with these times meets the SLO; None has failed."""
        return times is not None and all(
            times[name] <= limit for name, limit in self.limits.items()
        )

    @property
    def token_s(self) -> float | None:
        """The step time that the adaptive policy keeps to; None without a limit per token."""
        limits = [self.limits[name] for name in _TOKEN_TIMES if name in self.limits]
        if "silence" in self.limits:
            limits.append(self.limits["silence"] / _FORK_STEPS)
        return min(limits, default=None)


class GoodputSettings(ReplicaSettings):
    """What is searched: SLOs, methods, and the size of a run."""

    replicas: PositiveInt = 1
    """Number of replicas."""
    slo: list[str] = Field(
        [
            *(f"ttft=1s,tpot={multiple:g}x" for multiple in (0.75, 1.5, 3)),
            *(f"ttft=1s,tpot=3x,silence={multiple:g}x" for multiple in (5, 10)),
        ]
    )
    """Limits that a request must keep, such as ttft=1s,tpot=1.5x; x is the step time of a request
    that runs alone. Times: ttft, certain, tpot, path, tbt, silence, e2e. Repeatable (default: tpot
    of 0.75x, 1.5x and 3x, and 3x with silence of 5x and 10x, each with ttft=1s).
    """
    methods: tuple[Literal["off", "paced", "eager", "adaptive", "lists", "lists-adaptive"], ...] = (
        "off",
        "paced",
        "eager",
        "adaptive",
    )
    """Methods to compare: off (no forks), paced (no forks, but the adaptive policy), eager,
    adaptive; lists and lists-adaptive (lists without training). Default: the first four.
    """
    share: float = Field(0.95, ge=0.01, le=1)
    """Share of the requests that must meet the SLO."""
    requests: int = Field(1000, ge=50)
    """Number of requests of a run, per replica; a run lasts at least 60 s."""
    seed: NonNegativeInt = 0
    """Seed of the draw of requests and arrivals."""

    @cached_property
    def base(self) -> SimulationSettings:
        """The cluster; its rates, policies and duration are unused."""
        shared = {name: getattr(self, name) for name in ReplicaSettings.model_fields}
        return SimulationSettings(**shared, replicas=(self.replicas,))

    @property
    def step_s(self) -> float:
        """Step time of a request that runs alone."""
        return self.step_costs.step_s(StepBatch(1, _IDLE_CONTEXT), overlapped=True)

    @cached_property
    def objectives(self) -> list[Objective]:
        """The SLOs with their limits in seconds."""
        # Imports scipy, which takes a second.
        from cluster.loadtest.statistics import parse_slo

        return [Objective(text, parse_slo(text, TIMES, self.step_s)) for text in self.slo]

    @property
    def first_token_s(self) -> float:
        """Time to first token that the adaptive policy may use: the strictest of the SLOs."""
        return min((each.limits.get("ttft", 1.0) for each in self.objectives), default=1.0)

    def as_text(self) -> dict[str, str]:
        """Return the settings that all searches of a folder share."""
        return {
            "costs": repr(self.step_costs),
            "kv_tokens": str(self.cache_tokens),
            "traces": ", ".join(map(file_digest, self.trace)),
            "arrivals": "Poisson" if self.arrivals is None else file_digest(self.arrivals),
            "attention": str(self.family),
            "slos": "; ".join(self.slo),
            **{
                name: str(getattr(self, name))
                for name in ("replicas", "concurrency", "share", "requests", "seed")
            },
            "times": ", ".join(TIMES),
        }
