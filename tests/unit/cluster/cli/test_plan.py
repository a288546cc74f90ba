"""`apar plan` as a command, and that what it prints can be used."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from vllm.config import VllmConfig

from apar_core.attention.plan import StepPlanner
from apar_core.attention.settings import FamilySettings
from apar_core.scheduler.fork_settings import fork_settings
from apar_core.step_costs.files import write_costs
from apar_core.vllm_names import FullAttentionSpec
from cluster.lab.sizing.settings import PlanSettings
from deployments.app.application import engine_arguments
from deployments.config import ClusterConfig, load_config
from tests.fakes.apar_command import apar
from tests.fakes.overlays import K8S
from tests.unit.cluster.lab.sizing.small_replica import CONFIG, COSTS


def run(*arguments: str) -> tuple[int, str]:
    result = apar("plan", *arguments)
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of a small model on a made-up GPU, whose runs take a fraction of a second."""
    folder = tmp_path_factory.mktemp("model")
    config = {**CONFIG, "vocab_size": 100, "max_position_embeddings": 256, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    write_costs(COSTS, folder / "costs.json")
    return (
        "--model", str(folder), "--gpu", "mine", "--costs", str(folder / "costs.json"),
        "--kv-tokens", "1024", "--prompt-tokens", "16", "--answer-tokens", "16", "--caps", "6",
        "--requests", "100", "--processes", "1", "--first-token", "300ms",
    )  # fmt: skip


@pytest.fixture(scope="module")
def planned(small: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("out") / "serve.yaml"
    exit_code, output = run(*small, "--rate", "20", "--out", str(file), "--json")
    assert exit_code == 0, output
    plan = dict(json.loads(output.splitlines()[-1]))
    return {**plan, "file": file}


def test_the_yaml_configures_the_plan(planned: dict[str, Any]) -> None:
    config = load_config(planned["file"], {}, {})

    (model,) = config.models
    assert planned["config"] == planned["file"].read_text()
    assert model.replicas == planned["replicas"] == planned["serving_replicas"] + 1
    assert model.requests_per_replica == planned["max_concurrency"] == 6
    assert model.threads_per_replica >= planned["confirmed"]["peak_rows"]
    assert planned["overlay"]["available-pods"] == planned["serving_replicas"]
    for bound in ("pods", "max-pods"):
        assert planned["overlay"][bound] == planned["replicas"]
    # Names that the overlay has.
    parameters = (K8S / "overlays" / "gpu" / "parameters.env").read_text(encoding="utf-8")
    assert all(f"\n{name}=" in parameters for name in planned["overlay"])
    assert planned["gpus"] == planned["replicas"]


@pytest.mark.slow
def test_a_plan_with_family_attention_turns_it_on() -> None:
    ordinary, family = (
        PlanSettings(rate=1, model="llama-3-8b", max_model_len=2048, attention=name).replica("h100")
        for name in ("ordinary", "family")
    )

    assert ordinary == replace(family, family=None)
    # 64 MiB of blocks with 16 tokens, 8 KV heads of 128 elements, keys and values in 16 bits.
    assert family.family == FamilySettings(min_saved_blocks=1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "block_size", "least"), [((), 16, 16_384), (("--block-size", "32"), 32, 8_192)]
)
def test_the_threshold_of_a_plan_decides_in_the_worker(
    options: tuple[str, ...],
    block_size: int,
    least: int,
    small: tuple[str, ...],
    tmp_path: Path,
) -> None:
    file = tmp_path / "serve.yaml"
    exit_code, output = run(
        *small, *options, "--rate", "20", "--attention", "family", "--out", str(file)
    )
    assert exit_code == 0, output

    (model,) = load_config(file, {}, {}).models
    arguments = engine_arguments(model, on_gpu=True)
    assert arguments.get("block_size", 16) == block_size
    # vLLM sends its workers a copy.
    config = pickle.loads(
        pickle.dumps(VllmConfig(additional_config=arguments["additional_config"]))
    )
    assert fork_settings(config).attention == "family"
    # The plan's model has one layer with 2 heads of 32 elements: 64 MiB are `least` blocks. The
    # worker's own default would be another, because this layer has one head.
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
    )
    planner = StepPlanner(config, [], spec, None)
    assert planned_families(planner, least, block_size) == 1
    assert planned_families(planner, least - 1, block_size) == 0


def planned_families(planner: StepPlanner, num_shared: int, block_size: int) -> int:
    """Return the families of a step with two rows that share so many blocks."""
    shared = torch.arange(1, num_shared + 1, dtype=torch.int32)
    own = torch.tensor([[num_shared + 1], [num_shared + 2]], dtype=torch.int32)
    common: Any = SimpleNamespace(
        causal=True,
        mm_req_doc_ranges=None,
        num_reqs=2,
        seq_lens=torch.full((2,), (num_shared + 1) * block_size, dtype=torch.int32),
        query_start_loc_cpu=torch.arange(3, dtype=torch.int32),
        block_table_tensor=torch.cat((shared.expand(2, -1), own), 1),
    )
    plan = planner.plan(common)
    return 0 if plan is None else plan.families.num_families


@pytest.mark.slow
def test_worker_processes_give_the_same_bytes(small: tuple[str, ...]) -> None:
    here = run(*small, "--rate", "20", "--json")
    workers = run(*small, "--rate", "20", "--json", "--processes", "2")

    assert here[0] == workers[0] == 0
    assert here[1].splitlines()[-1] == workers[1].splitlines()[-1]


def test_the_plan_says_what_it_is_based_on(planned: dict[str, Any]) -> None:
    assert planned["provenance"] == "predicted for mine"
    assert planned["step_costs"]["source"] == "made up"
    assert planned["facts"]["step costs"] == "made up"
    assert " at most; `apar serve` captures CUDA graphs of up to 512" in planned["facts"]["rows"]
    assert planned["limits_s"] == {"first token": 0.3}
    assert planned["confirmed"]["times"]["first token"]["p99_s"] <= 0.3
    assert {each["forked"] for each in planned["candidates"]} == {True, False}
    assert all(each["limits"] for each in planned["candidates"])


def test_the_recommendation_comes_first_and_the_settings_last(small: tuple[str, ...]) -> None:
    options = ("--users", "40", "--think-time", "2s", "--min-replicas", "1", "--forks", "none")

    exit_code, output = run(*small, *options)

    assert exit_code == 0, output
    recommended = output.index("recommended: ")
    table = output.index("Candidates, each at its highest rate within the limits")
    assert recommended < output.index("limited by: ") < table < output.index("models:")
    assert " forked " not in output
    text = output[output.index("models:") : output.index("# For the overlay")]
    (model,) = ClusterConfig.model_validate(yaml.safe_load(text)).models
    assert model.autoscaling is not None
    assert model.autoscaling.min_replicas == 1
    assert model.autoscaling.target_threads is not None
    assert 0 < model.autoscaling.target_threads <= 6
    parameters = output[output.index("# For the overlay's") :].splitlines()
    assert "pods=1" in parameters
    assert f"max-pods={model.autoscaling.max_replicas}" in parameters


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("option", ["--rate", "--headroom", "--token"])
def test_values_that_are_not_finite_are_refused_by_their_option(option: str, value: str) -> None:
    exit_code, output = run("--rate", "20", option, value)

    assert exit_code == 2
    assert f"Invalid value for '{option}'" in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--model", "gone/away"), "no model 'gone/away'"),
        (("--gpu", "abacus"), "unknown GPU 'abacus'"),
        (("--gpu", "cpu"), "--gpu cpu needs --costs and --kv-tokens"),
        (("--model", "apar-13b", "--gpu", "l4"), "does not fit"),
        (("--answer-tokens", "3000"), "--answer-tokens 3000 exceed the context of 2,048"),
        (("--gpu-memory-utilization", "0.2"), "vLLM would not start"),
        (("--trace", "/no/such/file"), "--trace: "),
        (("--costs", "/no/such/file"), "cannot read step costs from /no/such/file"),
    ],
)
def test_impossible_plans_are_reported_in_one_line(arguments: tuple[str, ...], named: str) -> None:
    exit_code, output = run("--rate", "1", "--processes", "1", *arguments)

    assert exit_code == 1
    assert named in " ".join(output.split())
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give either --rate or --users"),
        (("--rate", "1", "--users", "5"), "give either --rate or --users"),
        (
            ("--rate", "1", "--attention", "flash"),
            "Invalid value for '--attention': 'flash' is not one of ordinary, family",
        ),
        (
            ("--rate", "1", "--forks", "wild"),
            "Invalid value for '--forks': 'wild' is not one of none, mixed, structured",
        ),
        (
            ("--rate", "1", "--gpu", "h100,h200", "--costs", "x.json"),
            "Invalid value for '--costs': is for one GPU, and --gpu names 2",
        ),
        (
            ("--rate", "1", "--gpu", "h100,h200", "--prices", "2"),
            "Invalid value for '--prices': has 1 prices for 2 GPUs",
        ),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], problem: str) -> None:
    exit_code, output = run(*arguments)

    assert exit_code == 2
    assert problem in " ".join(output.replace("│", " ").split())
