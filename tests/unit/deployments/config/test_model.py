"""Models, presets and fork limits."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from apar_core.scheduler.fork_settings import ForkSettings
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.files import ConfigError
from deployments.config.model import (
    MAX_THREADS,
    PRESETS,
    AdapterConfig,
    ForkLimits,
    ModelConfig,
    PromptChainConfig,
    multiplies_bfloat16,
)


@pytest.mark.parametrize(
    ("checkpoint", "requests", "threads"),
    [("apar-tiny", 64, 256), ("apar-7b", 350, MAX_THREADS), ("apar-13b", 180, 720)],
)
def test_presets_limit_requests_and_size_threads(
    checkpoint: str, requests: int, threads: int
) -> None:
    model = ModelConfig(checkpoint=checkpoint)

    assert model.requests_per_replica == requests
    assert model.threads_per_replica == threads
    assert model.public_name == checkpoint


def test_the_embedded_model_lies_in_the_package() -> None:
    assert (Path(ModelConfig().preset.path) / "config.json").is_file()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"checkpoint": "org/model"}, "org/model"),
        ({"checkpoint": "org/model", "name": "mine"}, "mine"),
        ({"name": "mine"}, "mine"),
    ],
)
def test_the_name_that_clients_send(values: dict[str, Any], name: str) -> None:
    assert ModelConfig(**values).public_name == name


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()

    assert ModelConfig(checkpoint=str(folder)).public_name == "my-model"


def test_a_deployment_is_named_after_the_model_in_plain_characters() -> None:
    assert ModelConfig(checkpoint="org/a model").deployment_name == "Replica-org-a-model"


def test_threads_are_never_fewer_than_requests() -> None:
    assert ModelConfig(max_concurrency=2000).threads_per_replica == 2000


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [
        ({}, 2**28),
        ({"checkpoint": "smollm2-135m"}, 2**30),
        ({"checkpoint": "apar-7b"}, 4 * 2**30),
        ({"kv_cache_gib": 0.5}, 2**29),
    ],
)
def test_kv_cache_on_cpu(values: dict[str, Any], num_bytes: int) -> None:
    assert ModelConfig(**values).kv_cache_bytes == num_bytes


@pytest.mark.parametrize(
    ("values", "gpus"),
    [
        ({}, 1.0),
        ({"gpus_per_replica": 4}, 4.0),
        ({"gpu_memory_share": 0.4}, 0.4),
        ({"gpus_per_replica": 2, "gpu_memory_share": 0.4}, 2.0),
        ({"engine": {"data_parallel_size": 2}, "gpu_memory_share": 0.4}, 2.0),
    ],
)
def test_replicas_share_a_gpu_by_their_share_of_its_memory(
    values: dict[str, Any], gpus: float
) -> None:
    assert ModelConfig(**values).gpus_in_ray == gpus


@pytest.mark.parametrize(
    ("gpus", "sizes", "num_gpus", "tensor"),
    [
        (None, {}, 1, 1),
        (4, {}, 4, 4),
        (None, {"tensor": 2, "pipeline": 3}, 6, 2),
        (None, {"data": 2}, 2, 1),
        (8, {"data": 2, "pipeline": 2}, 8, 2),
        (4, {"data": 2, "tensor": 2}, 4, 2),
    ],
)
def test_tensor_parallelism_takes_the_gpus_that_other_sizes_leave(
    gpus: int | None, sizes: dict[str, int], num_gpus: int, tensor: int
) -> None:
    engine = {f"{name}_parallel_size": size for name, size in sizes.items()}

    model = ModelConfig(gpus_per_replica=gpus, engine=engine)

    assert (model.num_gpus, model.tensor_parallel_size) == (num_gpus, tensor)


@pytest.mark.parametrize(
    ("gpus", "engine", "message"),
    [
        (3, {"data_parallel_size": 2}, "3 GPUs cannot be split into data_parallel_size 2"),
        (1, {"tensor_parallel_size": 2}, "1 GPUs cannot be split into tensor_parallel_size 2"),
        (4, {"tensor_parallel_size": 2}, "4 GPUs cannot be split into tensor_parallel_size 2"),
        (None, {"data_parallel_size": 0}, r"data_parallel_size: .* \(got 0\)"),
        (None, {"data_parallel_size": "2"}, r"data_parallel_size: .* \(got '2'\)"),
    ],
)
def test_gpus_that_the_parallel_sizes_cannot_use_are_refused(
    gpus: int | None, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig(gpus_per_replica=gpus, engine=engine)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"model": "other"}, "model: set the model's `checkpoint`"),
        ({"served_model_name": ["other"]}, "served_model_name: set the model's `name`"),
        ({"additional_config": {"apar": {"max_threads": 3}}}, "apar: set the model's `forks`"),
        ({"additional_config": "text"}, "a mapping is expected"),
        ({"data_parallel_size_local": 1}, "data_parallel_size_local: all processes of a replica"),
    ],
)
def test_engine_arguments_cannot_contradict_a_field(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig(engine=engine)


def test_min_replicas_are_those_configured_or_the_autoscalers() -> None:
    scaled = AutoscalingConfig(min_replicas=2, max_replicas=5)

    assert ModelConfig(replicas=3).min_replicas == 3
    assert ModelConfig(autoscaling=scaled).min_replicas == 2


def test_replay_excludes_speculative_decoding() -> None:
    speculation = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}

    assert not ModelConfig(engine=speculation).replay
    with pytest.raises(ValidationError, match=r"replay: not possible with .*speculative_config"):
        ModelConfig(replay=True, engine=speculation)


@pytest.mark.parametrize(
    "values",
    [
        {"enabled": False},
        {"max_threads": 3},
        {"max_forks": 5},
        {"max_replica_threads": 100},
        {"policy": "adaptive"},
        {"policy": "adaptive", "token_time_ms": 20.0},
    ],
)
def test_each_limit_reaches_the_engine(values: dict[str, Any]) -> None:
    limits = ForkLimits(**values)

    settings = ForkSettings.model_validate(limits.model_dump(exclude_none=True))

    assert settings.model_dump() == ForkSettings().model_dump() | values


def test_a_token_time_without_the_adaptive_policy_is_refused() -> None:
    with pytest.raises(ValidationError, match="has no effect without `policy: adaptive`"):
        ForkLimits(token_time_ms=20.0)


def test_a_chain_of_prompt_tokens_excludes_replay_and_other_speculation() -> None:
    chain = PromptChainConfig(prompt_tokens="apar-tiny")
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}

    with pytest.raises(ValidationError, match="replay: not possible with `prompt_chain`"):
        ModelConfig(replay=True, prompt_chain=chain)
    with pytest.raises(ValidationError, match=r"prompt_chain: .*`engine.speculative_config`"):
        ModelConfig(engine=ngram, prompt_chain=chain)
    with pytest.raises(ValidationError, match="num_speculative_tokens"):
        PromptChainConfig(prompt_tokens="apar-tiny", num_speculative_tokens=1)


def test_a_missing_folder_of_prompt_tokens_is_named(tmp_path: Path) -> None:
    there = PromptChainConfig(prompt_tokens="apar-tiny")
    missing = PromptChainConfig(prompt_tokens=str(tmp_path / "none"))

    ModelConfig(prompt_chain=there).check_checkpoint()
    with pytest.raises(ConfigError, match=r"prompt_chain.prompt_tokens: no such folder: .*none"):
        ModelConfig(prompt_chain=missing).check_checkpoint()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("multiverse", "parallel_format.*'multiverse' cannot be served: it continues after"),
        ("mine", "parallel_format.*unknown format 'mine'; known: apar, apar-released"),
        ({"name": "mine"}, "parallel_format.parent.*Field required"),
    ],
)
def test_a_format_that_cannot_be_served_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=re.compile(message, re.DOTALL)):
        ModelConfig.model_validate({"parallel_format": value})


def checkpoint_with_adapter(folder: Path) -> Path:
    shutil.copytree(PRESETS["apar-tiny"].path, folder / "model")
    adapter = folder / "model" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    return folder / "model"


def test_the_adapter_in_a_checkpoint_answers_requests_that_may_fork(tmp_path: Path) -> None:
    folder = checkpoint_with_adapter(tmp_path)
    adapter = folder / "adapter"
    model = ModelConfig(checkpoint=str(folder))

    model.check_checkpoint()
    assert model.fork_adapter_folder == adapter
    assert ModelConfig(checkpoint="apar-tiny").fork_adapter_folder is None
    assert ModelConfig(checkpoint=str(folder), fork_adapter="none").fork_adapter_folder is None
    elsewhere = ModelConfig(checkpoint="apar-tiny", fork_adapter=str(adapter))
    assert elsewhere.fork_adapter_folder == adapter
    # Whoever serves the adapter under a name of its own keeps the base as it is.
    named = AdapterConfig(name="forking", path=str(adapter))
    assert ModelConfig(checkpoint=str(folder), adapters=(named,)).fork_adapter_folder is None


def test_a_folder_that_is_no_fork_adapter_is_named(tmp_path: Path) -> None:
    model = ModelConfig(checkpoint="apar-tiny", fork_adapter=str(tmp_path))

    with pytest.raises(ConfigError, match=f"fork_adapter: {tmp_path} is no LoRA adapter"):
        model.check_checkpoint()


def test_thresholds_of_families_need_family_attention() -> None:
    with pytest.raises(ValidationError, match="family: has no effect without"):
        ModelConfig.model_validate({"family": {"min_rows": 3}})
    with pytest.raises(ValidationError, match="min_rows"):
        ModelConfig.model_validate({"attention": "family", "family": {"min_rows": 1}})


@pytest.mark.parametrize(
    ("cpu_info", "is_fast"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2 bmi2\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw avx512vl\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni avx_ne_convert\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True),
        ("processor\t: 0\n", True),
        (None, True),
    ],
)
def test_products_of_bfloat16_are_fast_on_some_cpus(
    cpu_info: str | None, is_fast: bool, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    if cpu_info is not None:
        file.write_text(cpu_info)

    assert multiplies_bfloat16(file) is is_fast
