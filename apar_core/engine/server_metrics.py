"""The `apar_*` metrics of vLLM's own server, on its page `/metrics` beside vLLM's.

They are those of a replica, with the label `engine` (as in vLLM's metrics) in place of `replica`;
those of finished requests have only the label `model`. The states of engines come with their
outputs (`apar_core/scheduler/state_reports.py`). With several API processes, vLLM's page adds up
what each has counted: every request is in one of them, and every engine reports to the first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from prometheus_client import REGISTRY
from vllm.config import VllmConfig

from apar_core.metrics.engine import (
    PROMPT_TOKENS,
    REQUEST_COUNTERS,
    REQUEST_HISTOGRAMS,
    Metric,
    record_numbers,
    record_request,
    record_state,
    record_totals,
)
from apar_core.metrics.recorder import Recorder
from apar_core.scheduler.core_state import CoreState, StepTotals
from apar_core.tree.statistics import TreeStatistics

_NO_STEPS = StepTotals(0, 0, 0.0)
_BEFORE_REQUESTS = CoreState(
    requests=0, threads=0, running_threads=0, waiting_threads=0, kv_blocks=0, free_blocks=0
)


class ServerMetrics:
    """Counts of one API process for all engines that it uses."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._model = str(vllm_config.model_config.served_model_name)
        self._requests = _Series({"model": self._model})
        for metric in REQUEST_COUNTERS:
            self._requests.inc(metric, 0)
        for metric in REQUEST_HISTOGRAMS:
            self._requests.declare(metric)
        for engine in _engines(vllm_config):
            # Prometheus sees no increase to a first value.
            series = self._of_engine(engine)
            record_numbers(series, _BEFORE_REQUESTS)
            record_totals(series, _BEFORE_REQUESTS, _NO_STEPS)

    def take_state(self, engine: int, state: CoreState) -> None:
        """Export an engine's state."""
        record_state(self._of_engine(engine), state)

    def finished(self, trees: TreeStatistics, num_prompt_tokens: int) -> None:
        """Count a request that is over, for whatever reason; each choice is a request."""
        self._requests.inc(PROMPT_TOKENS, num_prompt_tokens)
        record_request(self._requests, trees)

    def _of_engine(self, engine: int) -> _Series:
        return _Series({"model": self._model, "engine": str(engine)})


_announced: VllmConfig | None = None


def announce(vllm_config: VllmConfig | None) -> None:
    """Say whose output processor is built next; None if it exports no metrics.

    vLLM builds an engine's input processor and then its output processor, and gives only the first
    the engine's configuration.
    """
    global _announced
    _announced = vllm_config


def announced() -> VllmConfig | None:
    """Return the configuration of the engine whose output processor is being built, once."""
    vllm_config = _announced
    announce(None)
    return vllm_config


class _Series:
    """Series with the same labels, in the registry that vLLM's page shows."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels

    def inc(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        _recorder().inc(self._placed(metric), amount, **self._labels, **labels)

    def set_total(self, metric: Metric, total: float, **labels: str) -> None:
        _recorder().set_total(self._placed(metric), total, **self._labels, **labels)

    def set(self, metric: Metric, value: float | None, **labels: str) -> None:
        _recorder().set(self._placed(metric), value, **self._labels, **labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        _recorder().observe(self._placed(metric), value, **self._labels, **labels)

    def declare(self, metric: Metric) -> None:
        _recorder().declare(self._placed(metric), **self._labels)

    def _placed(self, metric: Metric) -> Metric:
        return _with_place(metric, "engine" if "engine" in self._labels else None)


@cache
def _recorder() -> Recorder:
    """What this process counts with; engines that it builds one after the other share it."""
    return Recorder(registry=REGISTRY)


@cache
def _with_place(metric: Metric, place: str | None) -> Metric:
    """Return a metric with another label, or none, in place of `replica`."""
    labels = {name: text for name, text in metric.labels.items() if name != "replica"}
    return replace(metric, labels=labels | ({place: ""} if place else {}))


def _engines(vllm_config: VllmConfig) -> range:
    """Return the indices of the data-parallel engines that this API process uses."""
    parallel = vllm_config.parallel_config
    is_local = parallel.local_engines_only
    number = parallel.data_parallel_size_local if is_local else parallel.data_parallel_size
    first = parallel.data_parallel_index
    return range(first, first + max(number, 1))
