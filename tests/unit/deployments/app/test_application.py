"""Effect of each setting in Ray Serve and in vLLM."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import LoggingConfig
from vllm.config import VllmConfig

from apar_core.attention.settings import FamilySettings
from apar_core.engine.prompt_chain import PROPOSER
from apar_core.engine.replay import REPLAY
from apar_core.models.guesses import SHIPPED_PROMPTS
from apar_core.scheduler.fork_settings import fork_settings
from deployments.app import application
from deployments.app.application import (
    build_application,
    engine_arguments,
    replica_environment,
)
from deployments.config import ClusterConfig
from deployments.config.model import (
    PRESETS,
    AdapterConfig,
    ForkLimits,
    ModelConfig,
    PromptChainConfig,
)
from deployments.gateway.settings import GatewaySettings, ServedModel
from deployments.replica.replica import ReplicaSettings
from deployments.serve_flags import APPLICATION_FLAGS


def deployments(config: ClusterConfig) -> tuple[GatewaySettings, list[Any]]:
    gateway = build_application(config)._bound_deployment
    arguments: Any = gateway.init_args
    settings, *replicas = arguments
    return settings.gateway, [replica._bound_deployment for replica in replicas]


def test_limits_reach_gateway_and_replica() -> None:
    model = ModelConfig(
        replicas=3, max_concurrency=10, max_queued_requests=7, max_queue_s=5, coalesce_s=0.02
    )

    gateway, [deployment] = deployments(ClusterConfig(models=(model,)))

    replica: ReplicaSettings = deployment.init_args[0]
    assert gateway.models == (
        ServedModel(
            name="apar-tiny",
            deployment="Replica-apar-tiny",
            replicas=3,
            wanted=3,
            requests_per_replica=10,
            max_queued=7,
            max_queue_s=5.0,
        ),
    )
    assert replica.served_name == "apar-tiny"
    assert replica.coalesce_s == 0.02
    assert deployment.max_ongoing_requests == 10
    assert deployment.num_replicas == 3


def test_the_application_contains_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CACHE", "REDIS", "COLLECTOR")
    for name in names:
        monkeypatch.setenv(name, f"sentinel-of-{name}")
    config = ClusterConfig.model_validate(
        {
            "limits": {
                "cache_secret": {"env": "CACHE"},
                "rate_storage": "redis://127.0.0.1:1",
                "rate_storage_password": {"env": "REDIS"},
            },
            "tracing": {
                "endpoint": "http://127.0.0.1:1",
                "headers": {"authorization": {"env": "COLLECTOR"}},
            },
        }
    )
    gateway: Any = build_application(config)._bound_deployment
    replica = gateway.init_args[1]._bound_deployment
    shown = json.dumps(gateway._deployment_config.user_config)
    stored = pickle.dumps((gateway.init_args[0], replica.init_args))

    assert all(name in shown for name in names)
    assert "sentinel" not in shown
    assert b"sentinel" not in stored


@pytest.mark.parametrize("ray_address", [None, "ray:6379"])
def test_ray_serves_flags_reach_the_gateway_and_the_replicas(ray_address: str | None) -> None:
    """The processes of a private cluster have them in their environment."""
    gateway: Any = build_application(ClusterConfig(ray_address=ray_address))._bound_deployment
    replica = gateway.init_args[1]._bound_deployment

    given = gateway.ray_actor_options["runtime_env"].get("env_vars")
    assert given == (None if ray_address is None else APPLICATION_FLAGS)
    replicas = replica.ray_actor_options["runtime_env"]["env_vars"]
    assert replicas.items() >= APPLICATION_FLAGS.items()


def test_every_model_has_its_own_replicas_in_the_gateways_order() -> None:
    models = (ModelConfig(), ModelConfig(checkpoint="org/plain", max_concurrency=2))

    gateway, replicas = deployments(ClusterConfig(models=models))

    assert [model.name for model in gateway.models] == ["apar-tiny", "org/plain"]
    assert [each.name for each in replicas] == ["Replica-apar-tiny", "Replica-org-plain"]
    assert [each.init_args[0].model for each in replicas][1] == "org/plain"
    assert [each.max_ongoing_requests for each in replicas] == [64, 2]


VICUNA = PRESETS["apar-7b"].engine["chat_template"]
PACED = {"apar": {"metrics": False, "output_interval_s": 0.05}}
"""The default of `coalesce_s`, where the engine core reads it."""


def test_user_arguments_override_the_presets_which_override_ours() -> None:
    model = ModelConfig(
        checkpoint="apar-7b", threads_per_request=2, kv_cache_gib=1, engine={"block_size": 64}
    )

    assert engine_arguments(model, on_gpu=False) == {
        "max_num_seqs": 700,
        "block_size": 64,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 2**30,
        "max_model_len": 2048,
        "chat_template": VICUNA,
        "additional_config": PACED,
    }
    assert engine_arguments(model, on_gpu=True) == {
        "max_num_seqs": 700,
        "block_size": 64,
        "max_model_len": 2048,
        "chat_template": VICUNA,
        # A multiple of 16 that holds all rows; vLLM's default is 512.
        "max_cudagraph_capture_size": 704,
        "additional_config": PACED,
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"checkpoint": "apar-7b"}, 1024),
        ({"max_concurrency": 128}, None),
        ({"max_concurrency": 129}, 528),
        ({"max_concurrency": 129, "engine": {"enforce_eager": True}}, None),
        ({"max_concurrency": 129, "engine": {"max_num_seqs": 512}}, None),
        ({"max_concurrency": 129, "engine": {"max_cudagraph_capture_size": 64}}, 64),
        ({"max_concurrency": 129, "engine": {"compilation_config": {"mode": 0}}}, None),
    ],
)
def test_cuda_graphs_hold_all_rows_of_forked_requests(
    settings: dict[str, Any], expected: int | None
) -> None:
    model = ModelConfig.model_validate({"checkpoint": "org/any", **settings})

    assert engine_arguments(model, on_gpu=True).get("max_cudagraph_capture_size") == expected
    assert engine_arguments(model, on_gpu=False).keys().isdisjoint({"cudagraph_capture_sizes"})


def test_an_engine_of_several_workers_on_a_cpu_runs_them_as_processes() -> None:
    executors = [
        engine_arguments(ModelConfig(engine=engine), on_gpu=False)["distributed_executor_backend"]
        for engine in ({"data_parallel_size": 2}, {"pipeline_parallel_size": 2})
    ]

    assert executors == ["uni", "mp"]


def test_gpus_of_a_model_reach_its_engine() -> None:
    model = ModelConfig(gpus_per_replica=2, gpu_memory_share=0.8)

    arguments = engine_arguments(model, on_gpu=True)

    assert arguments["tensor_parallel_size"] == 2
    assert arguments["gpu_memory_utilization"] == 0.8


def test_fork_limits_are_merged_into_additional_config() -> None:
    model = ModelConfig(
        forks=ForkLimits(max_threads=3), engine={"additional_config": {"other": {"key": 1}}}
    )

    assert engine_arguments(model, on_gpu=True)["additional_config"] == {
        "other": {"key": 1},
        "apar": {"max_threads": 3, "metrics": False, "output_interval_s": 0.05},
    }


@pytest.mark.parametrize(
    ("forks", "parser", "expected"),
    [
        ({}, None, ()),
        ({}, "hermes", ("<tool_call>",)),
        # A call of this parser is recognised by its text.
        ({}, "pythonic", ()),
        ({"tool_call_starts": []}, "hermes", ()),
        ({"tool_call_starts": ["<call>", "<do>"]}, "pythonic", ("<call>", "<do>")),
    ],
)
def test_an_engine_knows_the_tokens_with_which_a_tool_call_begins(
    forks: dict[str, Any], parser: str | None, expected: tuple[str, ...]
) -> None:
    engine = {} if parser is None else {"tool_call_parser": parser}
    model = ModelConfig.model_validate({"forks": forks, "engine": engine})

    arguments = engine_arguments(model, on_gpu=False)

    read = fork_settings(VllmConfig(additional_config=arguments["additional_config"]))
    assert read.tool_call_starts == expected
    assert ServedModel.of(model).forks_with_tools is bool(expected)


def test_tokens_that_are_sent_at_once_leave_the_engine_core_at_once() -> None:
    arguments = engine_arguments(ModelConfig(coalesce_s=0), on_gpu=True)

    assert arguments["additional_config"] == {"apar": {"metrics": False}}


def test_an_engine_replays_only_if_its_model_is_configured_to() -> None:
    mine = {"logits_processors": ["mine:Processor"]}

    replaying = engine_arguments(ModelConfig(replay=True, engine=mine), on_gpu=False)
    default = engine_arguments(ModelConfig(engine=mine), on_gpu=False)

    assert replaying["logits_processors"] == ["mine:Processor", REPLAY]
    assert default["logits_processors"] == ["mine:Processor"]
    assert "logits_processors" not in engine_arguments(ModelConfig(), on_gpu=True)
    # Both of vLLM's model runners replay.
    environment = replica_environment(ModelConfig(replay=True), on_gpu=True)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment


def test_fork_limits_of_a_model_reach_its_engine() -> None:
    limits = ForkLimits(max_threads=4, max_forks=9)

    arguments = engine_arguments(ModelConfig(forks=limits), on_gpu=False)

    read = fork_settings(VllmConfig(additional_config=arguments["additional_config"]))
    assert (read.enabled, read.max_threads, read.max_forks) == (True, 4, 9)


def test_a_fork_adapter_reaches_its_engine_beside_others(tmp_path: Path) -> None:
    other = AdapterConfig(name="other", path=str(tmp_path / "other"))
    model = ModelConfig(fork_adapter=str(tmp_path), adapters=(other,))

    arguments = engine_arguments(model, on_gpu=False)

    assert arguments["additional_config"]["apar"]["fork_adapter"] == str(tmp_path)
    assert [each["name"] for each in arguments["lora_modules"]] == ["other"]


@pytest.mark.parametrize(
    "value", ["hpd-parsing", {"like": "threadweaver", "join": {"suffix": "\n<Conclusion>\n"}}]
)
def test_a_models_format_reaches_its_engine(value: object) -> None:
    model = ModelConfig.model_validate({"checkpoint": "org/any", "parallel_format": value})

    arguments = engine_arguments(model, on_gpu=False)

    read = fork_settings(VllmConfig(additional_config=arguments["additional_config"]))
    assert read.parallel_format == model.parallel_format


def test_a_chain_of_prompt_tokens_reaches_the_engine_beside_the_fork_limits() -> None:
    model = ModelConfig(
        forks=ForkLimits(max_threads=4),
        prompt_chain=PromptChainConfig(prompt_tokens="apar-tiny", num_speculative_tokens=2),
    )

    arguments = engine_arguments(model, on_gpu=False)

    settings = fork_settings(VllmConfig(additional_config=arguments["additional_config"]))
    assert (settings.max_threads, settings.prompt_tokens) == (4, SHIPPED_PROMPTS["apar-tiny"])
    assert arguments["speculative_config"] == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 2,
    }


def test_replicas_on_cpu_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)

    large = ModelConfig(checkpoint="org/model")
    environment = replica_environment(large, on_gpu=False, num_replicas=3)
    small = replica_environment(
        ModelConfig(checkpoint="smollm2-135m"), on_gpu=False, num_replicas=3
    )
    tiny = replica_environment(ModelConfig(), on_gpu=False, num_replicas=3)
    chosen = replica_environment(ModelConfig(cpu_threads=3), on_gpu=False, num_replicas=3)

    assert environment["OMP_NUM_THREADS"] == "4"
    assert small["OMP_NUM_THREADS"] == "4"
    assert tiny["OMP_NUM_THREADS"] == "1"
    assert chosen["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in replica_environment(ModelConfig(), on_gpu=True)


def test_without_a_compiler_an_engine_on_cpu_is_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(checkpoint="org/model")
    (tmp_path / "my-g++").write_text("#!/bin/sh\n")
    (tmp_path / "my-g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    assert engine_arguments(model, on_gpu=False)["enforce_eager"] is True
    assert replica_environment(model, on_gpu=False)["TORCH_COMPILE_DISABLE"] == "1"
    # Triton's compiler is another one.
    assert "enforce_eager" not in engine_arguments(model, on_gpu=True)
    mine = ModelConfig(checkpoint="org/model", engine={"enforce_eager": False})
    assert engine_arguments(mine, on_gpu=False)["enforce_eager"] is False
    monkeypatch.setenv("CXX", "my-g++")
    assert "enforce_eager" not in engine_arguments(model, on_gpu=False)


def test_an_eager_engine_on_cpu_does_not_compile_the_sampler() -> None:
    compiled = ModelConfig(engine={"enforce_eager": False})

    assert replica_environment(ModelConfig(), on_gpu=False)["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in replica_environment(compiled, on_gpu=False)
    assert "TORCH_COMPILE_DISABLE" not in replica_environment(ModelConfig(), on_gpu=True)


@pytest.mark.parametrize("field", ["enable_access_log", "log_level"])
def test_ray_serve_has_the_logging_settings_we_set(field: str) -> None:
    assert field in LoggingConfig.model_fields


def test_the_application_is_built_and_the_gateway_runs_without_vllm_and_pytorch() -> None:
    program = (
        "import sys, deployments.app.kuberay, deployments.app.service;"
        "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules])"
    )

    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert found.stdout == "[]\n"


def test_family_attention_and_its_thresholds_reach_the_engine() -> None:
    plain = engine_arguments(ModelConfig(), on_gpu=True)
    model = ModelConfig.model_validate({"attention": "family", "family": {"min_prefix_blocks": 8}})
    arguments = engine_arguments(model, on_gpu=True)

    read = fork_settings(VllmConfig(additional_config=arguments.pop("additional_config")))

    assert (read.attention, read.family) == ("family", FamilySettings(min_prefix_blocks=8))
    assert plain.pop("additional_config") == PACED
    assert arguments == plain


def test_small_models_use_float32_where_bfloat16_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(application, "multiplies_bfloat16", lambda: False)

    assert engine_arguments(ModelConfig(), on_gpu=False)["dtype"] == "float32"
    fetched = ModelConfig(checkpoint="smollm2-135m")
    assert engine_arguments(fetched, on_gpu=False)["dtype"] == "float32"
    mine = ModelConfig(engine={"dtype": "bfloat16"})
    assert engine_arguments(mine, on_gpu=False)["dtype"] == "bfloat16"
    assert "dtype" not in engine_arguments(ModelConfig(), on_gpu=True)
    # Twice the memory may be too much for a large checkpoint.
    assert "dtype" not in engine_arguments(ModelConfig(checkpoint="org/model"), on_gpu=False)
    monkeypatch.setattr(application, "multiplies_bfloat16", lambda: True)
    assert "dtype" not in engine_arguments(ModelConfig(), on_gpu=False)
