"""vLLM's stat logger over our buffers: every metric of it can be recorded and handed over."""

from pathlib import Path

import pytest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from deployments.metrics.vllm_stats import VllmStats
from tests.fakes.scripted_engine import EngineShape, ScriptedEngine, write_model_config
from tests.unit.deployments.metrics.played_instruments import PlayedInstruments


@pytest.fixture(scope="module")
def stats_and_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[VllmStats, PrometheusStatLogger, PlayedInstruments]:
    folder: Path = write_model_config(tmp_path_factory.mktemp("model"))
    config = ScriptedEngine(EngineShape(), folder).scheduler.vllm_config
    told = PlayedInstruments()
    stats = VllmStats(told, "r1")
    return stats, stats.stat_logger(config, [0]), told


Given = tuple[VllmStats, PrometheusStatLogger, PlayedInstruments]


def test_vllm_takes_it_for_a_prometheus_logger_and_makes_no_other(stats_and_told: Given) -> None:
    stats, logger, _ = stats_and_told

    assert isinstance(logger, PrometheusStatLogger)
    assert issubclass(stats.stat_logger, PrometheusStatLogger)


def test_its_numbers_are_handed_over_under_vllms_names(stats_and_told: Given) -> None:
    stats, logger, told = stats_and_told
    iteration = IterationStats()
    iteration.num_generation_tokens = 7
    iteration.time_to_first_tokens_iter = [0.3]
    iteration.inter_token_latencies_iter = [0.02, 0.02, 3.0]

    logger.record(SchedulerStats(num_running_reqs=3, kv_cache_usage=0.25), iteration)
    logger.record(SchedulerStats(num_running_reqs=2, kv_cache_usage=0.5), iteration)
    stats.flush()

    def value(name: str, **labels: str) -> float | None:
        [model] = {
            dict(labels)["model_name"] for _, labels in told.values if "model_name" in dict(labels)
        }
        return told.value(name, model_name=model, engine="0", ReplicaId="r1", **labels)

    assert value("vllm_num_requests_running") == 2
    assert value("vllm_kv_cache_usage_perc") == 0.5
    assert value("vllm_generation_tokens") == 14
    assert value("vllm_num_preemptions") == 0
    assert value("vllm_time_to_first_token_seconds_count") == 2
    assert value("vllm_time_to_first_token_seconds_sum") == 0.6
    assert value("vllm_inter_token_latency_seconds_bucket", le="0.025") == 4
    assert value("vllm_inter_token_latency_seconds_bucket", le="+Inf") == 6


def test_recording_calls_nobody(stats_and_told: Given) -> None:
    _, logger, told = stats_and_told
    before = told.told

    logger.record(SchedulerStats(num_running_reqs=1), IterationStats())

    assert told.told == before
