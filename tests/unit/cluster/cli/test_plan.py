"""`apar plan` as a command, and that what it prints can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig, load_config
from cluster.metrics import catalogue
from tests.fakes.apar_command import apar
from tests.fakes.metrics_page import MetricsPage, served

LOAD = ("--rate", "20", "--token", "50ms")
BUDGET = "PodDisruptionBudget apar-engines minAvailable"


def run(*arguments: str) -> tuple[int, str]:
    result = apar("plan", *arguments)
    return result.exit_code, result.output


def content(*arguments: str) -> dict[str, Any]:
    exit_code, output = run(*arguments, "--json")
    assert exit_code == 0, output
    return dict(json.loads(output))


def test_the_table_gives_each_figure_with_its_reason() -> None:
    exit_code, output = run(*LOAD, "--model", "apar-7b", "--gpu", "a100-80g")

    assert exit_code == 0
    for words in (
        "12.55 GiB", "512 KiB", "2 x 32 layers x 32 KV heads x 128 x 2 bytes", "7,158 blocks",
        "not measured", "the paper's cap on an A100-80G is 350", "Little's law", "20% headroom",
        "99 of 100 moments", "max_concurrency", "workerGroupSpecs/0/replicas",
    ):  # fmt: skip
        assert words in output, words


def test_the_yaml_configures_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"

    plan = content(*LOAD, "--out", str(file), "--max-model-len", "1024", "--tensor-parallel", "2")

    config = load_config(file, {}, {})
    (model,) = config.models
    assert plan["config"] == file.read_text()
    assert model.replicas == plan["replicas"] == plan["serving_replicas"] + 1
    assert model.requests_per_replica == plan["max_concurrency"]
    assert plan["threads"] <= model.threads_per_replica <= plan["threads"] + 1
    assert model.forks.max_replica_threads == plan["threads"]
    assert (model.gpus_per_replica, model.gpu_memory_share) == (2, 0.9)
    assert model.engine == {"max_model_len": 1024}


def test_a_plan_for_the_autoscaler_has_its_targets() -> None:
    plan = content(*LOAD, "--min-replicas", "2")

    (model,) = ClusterConfig.model_validate(yaml.safe_load(plan["config"])).models
    assert model.autoscaling is not None
    assert model.autoscaling.min_replicas == 2
    assert model.autoscaling.max_replicas == plan["replicas"]
    threads = plan["most"]["requests"] * plan["shape"]["alive_threads"]
    assert model.autoscaling.target_threads == pytest.approx(threads, abs=0.5)
    # KubeRay changes nobody's number of pods: each engine that may come has its own.
    for bound in ("replicas", "minReplicas", "maxReplicas"):
        assert plan["overlay"][f"workerGroupSpecs/0/{bound}"] == plan["replicas"]
    assert plan["overlay"][BUDGET] == plan["serving_replicas"]


@pytest.mark.parametrize(("rate", "spare"), [("1", "0"), ("20", "0"), ("20", "2")])
def test_one_of_several_pods_may_be_evicted(rate: str, spare: str) -> None:
    plan = content("--rate", rate, "--spare", spare)

    left = plan["serving_replicas"] - (spare == "0")
    assert plan["overlay"][BUDGET] == max(1, left)


def test_the_embedded_model_is_planned_for_a_cpu() -> None:
    plan = content("--rate", "5", "--model", "apar-tiny", "--prompt-tokens", "30",
                   "--answer-tokens", "150")  # fmt: skip

    (model,) = ClusterConfig.model_validate(yaml.safe_load(plan["config"])).models
    assert model.kv_cache_gib == 0.25
    assert model.gpu_memory_share is None
    assert plan["kv_blocks"] == 2048
    assert "measured for apar-tiny" in plan["costs"]["source"]
    assert not any("gpu" in name for name in plan["overlay"])


def test_dimensions_of_model_and_gpu_may_be_given() -> None:
    plan = content(
        *LOAD, "--model", "mine", "--parameters", "1.5", "--layers", "20", "--kv-heads", "4",
        "--head-dim", "128", "--gpu", "mine", "--gpu-memory-gib", "32", "--gpu-bandwidth-gb-s",
        "1000", "--gpu-tflops", "200",
    )  # fmt: skip

    per_token = 2 * 20 * 4 * 128 * 2
    kv_bytes = 2**30 * (32 * 0.9 - 2.8) - 3e9
    assert plan["kv_blocks"] == int(kv_bytes // (16 * per_token))


def test_measured_constants_are_taken_as_they_are() -> None:
    plan = content(
        *LOAD, "--step-time-base", "8ms", "--step-time-per-thread", "0.2ms",
        "--step-time-per-prompt-token", "50us",
    )  # fmt: skip

    costs = plan["costs"]
    assert (costs["base_s"], costs["thread_s"], costs["source"]) == (0.008, 0.0002, "given")
    assert costs["prefill_token_s"] == pytest.approx(50e-6)
    assert plan["caps"]["by_token_time"] < 210


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("option", ["--rate", "--headroom", "--token", "--measure-for"])
def test_values_that_are_not_finite_are_refused_by_their_option(option: str, value: str) -> None:
    exit_code, output = run(*LOAD, option, value)

    assert exit_code == 2
    assert f"Invalid value for '{option}'" in output


def test_a_trace_is_planned_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"prompt": "p" * 420, "response": "x" * 420}))

    plan = content(*LOAD, "--trace", str(file))

    assert plan["shape"]["prompt_tokens"] == 140
    assert plan["shape"]["text_tokens"] == 100
    assert plan["shape"]["source"] == str(file)


def test_step_times_are_measured_on_a_running_cluster() -> None:
    page = MetricsPage()
    page.set(catalogue.THREADS, 1, model="m", replica="r", state="running")
    with served(page.text()) as server:
        arguments = ("--measure-from", server.url, "--measure-for", "1s", "--step-time-base", "3ms")
        exit_code, output = run(*LOAD, *arguments)

    assert exit_code == 1
    assert "its engines made next to no steps" in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rate", "1", "--model", "gone/away"), "no model 'gone/away'"),
        (("--rate", "1", "--layers", "3"), "give all of --parameters"),
        (("--rate", "1", "--gpu", "abacus"), "unknown GPU 'abacus'"),
        (("--rate", "1", "--gpu", "cpu"), "step times on this CPU are unknown"),
        (("--rate", "1", "--step-time-base", "3ms"), "give both --step-time-base"),
        (
            ("--rate", "1", "--step-time-base", "0s", "--step-time-per-thread", "0s"),
            "takes no time",
        ),
        (("--rate", "1", "--model", "apar-13b", "--gpu", "l4"), "does not fit"),
        (("--rate", "1", "--answer-tokens", "3000"), "longer than the context of 2,048"),
        (
            ("--rate", "1", "--gpu", "l4", "--gpu-memory-utilization", "0.72"),
            "vLLM would not start",
        ),
        (("--rate", "1", "--trace", "/no/such/file"), "cannot be read"),
        (("--rate", "1", "--out", "/no/such/folder/x"), "No such file or directory"),
    ],
)
def test_impossible_plans_are_reported_in_one_line(arguments: tuple[str, ...], named: str) -> None:
    exit_code, output = run(*arguments)

    assert exit_code == 1
    assert named in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give either --rate or --users"),
        (("--rate", "1", "--users", "5"), "give either --rate or --users"),
        (
            ("--rate", "1", "--forks", "wild"),
            "Invalid value for '--forks': 'wild' is not one of none, mixed, structured",
        ),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], problem: str) -> None:
    exit_code, output = run(*arguments)

    assert exit_code == 2
    assert problem in " ".join(output.split())
