"""vLLM's stat logger on our buffers records and exports every metric."""

from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.fork_parameters import EXTRA_ARG
from deployments.metrics.vllm_stats import VllmStats
from tests.fakes.instruments import FakeInstruments
from tests.fakes.scripted_engine import (
    END,
    FORK,
    EngineShape,
    ScriptedEngine,
    fork_parameters,
    write_model_config,
)


@pytest.fixture(scope="module")
def given(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[VllmStats, PrometheusStatLogger, FakeInstruments]:
    folder: Path = write_model_config(tmp_path_factory.mktemp("model"))
    config = ScriptedEngine(EngineShape(), folder).scheduler.vllm_config
    exported = FakeInstruments()
    stats = VllmStats(exported, "r1")
    return stats, stats.stat_logger(config, [0]), exported


Given = tuple[VllmStats, PrometheusStatLogger, FakeInstruments]


def test_vllm_accepts_it_as_a_prometheus_logger_and_makes_no_other(given: Given) -> None:
    stats, logger, _ = given

    assert isinstance(logger, PrometheusStatLogger)
    assert issubclass(stats.stat_logger, PrometheusStatLogger)


def test_numbers_are_exported_under_vllms_names(given: Given) -> None:
    stats, logger, exported = given
    iteration = IterationStats()
    iteration.num_generation_tokens = 7
    iteration.time_to_first_tokens_iter = [0.3]
    iteration.inter_token_latencies_iter = [0.02, 0.02, 3.0]

    logger.record(SchedulerStats(num_running_reqs=3, kv_cache_usage=0.25), iteration)
    logger.record(SchedulerStats(num_running_reqs=2, kv_cache_usage=0.5), iteration)
    stats.flush()

    def value(name: str, **labels: str) -> float | None:
        [model] = {
            dict(labels)["model_name"]
            for _, labels in exported.values
            if "model_name" in dict(labels)
        }
        return exported.value(name, model_name=model, engine="0", ReplicaId="r1", **labels)

    assert value("vllm_num_requests_running") == 2
    assert value("vllm_kv_cache_usage_perc") == 0.5
    assert value("vllm_generation_tokens") == 14
    assert value("vllm_num_preemptions") == 0
    assert value("vllm_time_to_first_token_seconds_count") == 2
    assert value("vllm_time_to_first_token_seconds_sum") == 0.6
    assert value("vllm_inter_token_latency_seconds_bucket", le="0.025") == 4
    assert value("vllm_inter_token_latency_seconds_bucket", le="+Inf") == 6


def test_recording_makes_no_call_to_ray(given: Given) -> None:
    _, logger, exported = given
    before = exported.num_calls

    logger.record(SchedulerStats(num_running_reqs=1), IterationStats())

    assert exported.num_calls == before


def test_preemptions_of_children_are_counted(tmp_path: Path) -> None:
    script = {"": [10, FORK, *range(20, 50), END], "0": [*range(60, 90), END]}
    engine = ScriptedEngine(EngineShape(num_blocks=24), write_model_config(tmp_path))
    exported = FakeInstruments()
    stats = VllmStats(exported, "r1")
    logger = stats.stat_logger(engine.scheduler.vllm_config, [0])
    processor = ForkOutputProcessor(None, log_stats=True)
    preempted: dict[str, int] = {}
    for number in range(3):
        request_id = f"r{number}"
        extra_args = {EXTRA_ARG: fork_parameters().to_extra_arg()}
        request = EngineCoreRequest(
            request_id,
            [5] * 9,
            None,
            SamplingParams(max_tokens=200, extra_args=extra_args),
            None,
            0.0,
            None,
            None,
            None,
            external_req_id=request_id,
        )
        processor.add_request(request, None)
        engine.add(request_id, [5] * 9, script, arrival_time=float(number))

    while engine.step():
        preempted |= {
            name: each.num_preemptions for name, each in engine.scheduler.requests.items()
        }
        iteration = IterationStats()
        outputs = [output for message in engine.take_messages() for output in message.outputs]
        processor.process_outputs(outputs, iteration.iteration_timestamp, iteration)
        logger.record(SchedulerStats(), iteration)
    stats.flush()

    assert sum(count for name, count in preempted.items() if "~" in name) > 0
    counted = exported.value(
        "vllm_num_preemptions",
        model_name=str(engine.scheduler.vllm_config.model_config.served_model_name),
        engine="0",
        ReplicaId="r1",
    )
    assert counted == sum(preempted.values())
