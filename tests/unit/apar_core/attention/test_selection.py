"""Which engines and layers are read row by row although `attention: family` is set."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apar_core.attention.selection import (
    WORKERS,
    engine_problem,
    family_settings,
    layer_problem,
    reads_families,
    use_family_attention,
)
from apar_core.attention.settings import FamilySettings

CPU_WORKER, GPU_WORKER = WORKERS


def engine(**sections: dict[str, Any]) -> Any:
    """Return a vLLM configuration that fits, but for the given values."""
    given: dict[str, dict[str, Any]] = {
        "model_config": {
            "runner_type": "generate",
            "use_mla": False,
            "dtype": torch.float16,
            "rswa_window": None,
        },
        "cache_config": {"cache_dtype": "auto", "kv_sharing_fast_prefill": False},
        "parallel_config": {
            "worker_cls": GPU_WORKER,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "use_ubatching": False,
        },
        "scheduler_config": {"async_scheduling": True},
    }
    parts = {name: SimpleNamespace(**given[name] | sections.get(name, {})) for name in given}
    return SimpleNamespace(**parts, speculative_config=sections.get("speculative_config"))


def layer(**values: Any) -> Any:
    given: dict[str, Any] = {
        "attn_type": "decoder",
        "sliding_window": (-1, -1),
        "alibi_slopes": None,
        "logits_soft_cap": 0,
        "sinks": None,
        "kv_cache_dtype": "auto",
    }
    return SimpleNamespace(**given | values)


def test_an_engine_that_fits_gets_our_worker(caplog: pytest.LogCaptureFixture) -> None:
    for (theirs, ours), cache_dtype in zip(WORKERS.items(), ("auto", "float16"), strict=True):
        config = engine(
            parallel_config={"worker_cls": theirs}, cache_config={"cache_dtype": cache_dtype}
        )

        # A configuration may be completed twice.
        use_family_attention(config)
        use_family_attention(config)

        assert config.parallel_config.worker_cls == ours
        assert reads_families(config)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("section", "values", "problem"),
    [
        ("model_config", {"use_mla": True}, "latent"),
        ("model_config", {"runner_type": "pooling"}, "'pooling'"),
        ("model_config", {"rswa_window": 128}, "sliding window"),
        ("cache_config", {"cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ("cache_config", {"cache_dtype": "bfloat16"}, "bfloat16"),
        ("cache_config", {"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "decode context parallelism"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ("parallel_config", {"use_ubatching": True}, "microbatches"),
        ("parallel_config", {"worker_cls": "org.Worker"}, "org.Worker"),
        ("speculative_config", {"method": "ngram"}, "speculative decoding on a GPU"),
    ],
)
def test_an_engine_that_does_not_fit_keeps_vllms_worker_and_says_why(
    section: str, values: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine(**{section: values})
    before = config.parallel_config.worker_cls

    with caplog.at_level(logging.WARNING):
        use_family_attention(config)

    assert config.parallel_config.worker_cls == before
    # Fork policy and router then count each thread as without it.
    assert not reads_families(config)
    (message,) = caplog.messages
    assert problem in message


@pytest.mark.parametrize("ahead", [True, False])
def test_speculation_on_a_cpu_fits_unless_steps_are_scheduled_ahead(ahead: bool) -> None:
    config = engine(
        speculative_config={"method": "ngram"},
        scheduler_config={"async_scheduling": ahead},
        parallel_config={"worker_cls": CPU_WORKER},
    )

    problem = engine_problem(config)

    assert problem == ("speculative decoding with asynchronous scheduling" if ahead else None)


def test_batch_invariance_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")

    assert engine_problem(engine()) == "VLLM_BATCH_INVARIANT"


@pytest.mark.parametrize("window", [None, -1, (-1, -1)])
def test_a_layer_without_extras_fits(window: Any) -> None:
    assert layer_problem(layer(sliding_window=window)) is None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
        ({"sliding_window": (39, 0)}, "a sliding window"),
        ({"sliding_window": 40}, "a sliding window"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "a soft cap of logits"),
        ({"sinks": [0.0]}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of type fp8"),
        ({"chunk_lookback": 2}, "a limited look-back"),
    ],
)
def test_a_layer_that_does_not_fit(values: dict[str, Any], problem: str) -> None:
    assert layer_problem(layer(**values)) == problem


def test_thresholds_are_those_of_the_engine() -> None:
    def settings(device: str, **limits: int) -> FamilySettings:
        config = SimpleNamespace(
            additional_config={"apar": {"attention": "family", "family": limits}} if limits else {},
            device_config=SimpleNamespace(device_type=device),
        )
        return family_settings(config, 262_144)  # type: ignore[arg-type]

    assert settings("cpu", min_rows=3) == FamilySettings(min_rows=3)
    assert settings("cpu") == FamilySettings()
    # 16 tokens of Llama-7B.
    assert settings("cuda", min_rows=3) == FamilySettings(min_rows=3, min_saved_blocks=256)
    assert settings("cuda") == FamilySettings(min_saved_blocks=256)
    assert settings("cuda", min_saved_blocks=0) == FamilySettings()
