"""LoRA adapters beside their base model, without merging."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.scheduler.core_state import CoreState, core_state
from tests.integration.engine_process import EngineProcess
from tests.integration.features.tiny_adapter import Adapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = (
    "Give me 5 tips for learning guitar.",
    "Give me 3 tips for sleeping well.",
    "Give me 4 tips for saving water.",
    "Hi",
)
# Unmerged, a weight is applied as the sum of two products, which rounds differently.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class LoraAnswer:
    text: str
    forks: int
    # Log-probability of each token of the text.
    logprobs: tuple[float, ...]


def answers(
    engine: OfflineEngine, adapters: list[str | None]
) -> tuple[list[LoraAnswer], CoreState]:
    """Answers to all questions with each adapter, all at once. Runs in the engine's process."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompts: list[Any] = [engine.chat_prompt(question) for question in QUESTIONS] * len(adapters)
    requests: list[Any] = [
        None if path is None else LoRARequest("adapter", 1, path)
        for path in adapters
        for _ in QUESTIONS
    ]
    params = SamplingParams(temperature=0.0, max_tokens=200, logprobs=0)
    outputs = engine.llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    records = engine._engine.output_processor.records
    found = []
    for output in outputs:
        [choice] = output.outputs
        assert choice.logprobs is not None
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        found.append(
            LoraAnswer(
                choice.text,
                records.take(output.request_id).statistics.forks,
                tuple(each[token].logprob for token, each in pairs if each),
            )
        )
    return found, core_state(engine.scheduler)


def answers_and_counts(
    engine: OfflineEngine, adapters: list[str | None]
) -> tuple[list[LoraAnswer], dict[str, int]]:
    """Answers as of `answers`, and the worker's counts of families."""
    found, _ = answers(engine, adapters)
    (counts,) = engine.llm.collective_rpc("family_counts")
    return found, counts


def asked(
    model: Path,
    *adapters: str | None,
    ask: Callable[..., tuple[list[LoraAnswer], Any]] = answers,
    again: bool = False,
    **arguments: Any,
) -> tuple[list[LoraAnswer], Any]:
    engine = EngineProcess(model=str(model), **arguments)
    try:
        if again:
            engine.call(ask, list(adapters))
        return engine.call(ask, list(adapters))
    finally:
        engine.close()


def test_an_unmerged_adapter_answers_like_the_merged_model_beside_its_base(
    adapter: Adapter,
) -> None:
    expected, _ = asked(adapter.merged, None)
    base_alone, _ = asked(adapter.base, None, additional_config={"apar": {"enabled": False}})

    # The second time, the prefix cache has the prompts of both.
    found, state = asked(
        adapter.base,
        None,
        str(adapter.adapter),
        again=True,
        enable_lora=True,
        max_lora_rank=8,
        additional_config={"apar": {"enabled": False, "adapters": {"adapter": True}}},
    )

    base, adapted = found[: len(QUESTIONS)], found[len(QUESTIONS) :]
    assert [each.text for each in adapted] == [each.text for each in expected]
    assert [each.forks for each in adapted] == [each.forks for each in expected]
    assert sum(each.forks for each in adapted) >= 8
    gap = max(
        abs(mine - theirs)
        for one, other in zip(adapted, expected, strict=True)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True)
    )
    assert gap < LOGPROB_TOLERANCE
    assert [each.text for each in base] == [each.text for each in base_alone]
    assert not any(each.forks for each in base)
    assert all(one.text != other.text for one, other in zip(base[:3], adapted[:3], strict=True))
    assert state.free_blocks == state.kv_blocks


@dataclass(frozen=True)
class Limited:
    """Answers to the questions: those that may fork, and two kinds of those that may not."""

    forked: list[str]
    unforked: list[str]
    constrained: list[str]
    num_forks: int


CHOICES = ("Tune the guitar every day.", "Never tune it.")


def limited(engine: OfflineEngine) -> Limited:
    """Ask everything at once. Runs in the engine's process."""
    from vllm.sampling_params import StructuredOutputsParams

    plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200}
    constraint = {"structured_outputs": StructuredOutputsParams(choice=list(CHOICES))}
    kinds = (plain, plain | {"extra_args": {"apar_enabled": False}}, plain | constraint)
    prompts: list[Any] = [engine.chat_prompt(question) for question in QUESTIONS]
    found = engine.generate(prompts * len(kinds), [each for each in kinds for _ in prompts])
    texts = [answer.text for answer in found]
    records = [answer.record for answer in found]
    number = len(prompts)
    return Limited(
        texts[:number],
        texts[number : 2 * number],
        texts[2 * number :],
        sum(record.statistics.forks for record in records if record is not None),
    )


def test_only_requests_that_may_fork_are_answered_with_the_fork_adapter(adapter: Adapter) -> None:
    expected, _ = asked(adapter.merged, None)
    base_alone, _ = asked(adapter.base, None, additional_config={"apar": {"enabled": False}})
    engine = EngineProcess(
        model=str(adapter.base),
        additional_config={"apar": {"fork_adapter": str(adapter.adapter)}},
    )
    try:
        found = engine.call(limited)
        again = engine.call(limited)
    finally:
        engine.close()

    assert found.forked == [each.text for each in expected]
    assert found.unforked == [each.text for each in base_alone]
    assert set(found.constrained) <= set(CHOICES)
    assert found.num_forks == sum(each.forks for each in expected) >= 8
    # From the prefix cache, which must keep the two apart.
    assert again == found


def test_a_fork_adapter_that_is_not_there_is_named(adapter: Adapter, tmp_path: Path) -> None:
    settings = {"apar": {"fork_adapter": str(tmp_path)}}
    with pytest.raises(Exception, match=f"apar.fork_adapter: {tmp_path} has no adapter_config"):
        EngineProcess(model=str(adapter.base), additional_config=settings)


def test_family_attention_changes_no_answer_of_an_adapter_or_its_base(adapter: Adapter) -> None:
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    apar: dict[str, Any] = {"enabled": False, "adapters": {"adapter": True}}
    adapters = [None, str(adapter.adapter)]
    expected, _ = asked(adapter.base, *adapters, **lora, additional_config={"apar": apar})
    apar |= {"attention": "family", "family": {"min_prefix_blocks": 1}}
    lora["additional_config"] = {"apar": apar}
    found, counts = asked(adapter.base, *adapters, ask=answers_and_counts, **lora)

    assert [each.text for each in found] == [each.text for each in expected]
    assert sum(each.forks for each in found) >= 8
    assert counts["saved_blocks"] > 0


def test_vllm_refuses_an_adapter_that_keeps_rows_as_peft_does(
    adapter: Adapter, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    values = json.loads((adapter.adapter / "adapter_config.json").read_text())
    values |= {"trainable_token_indices": {"embed_tokens": [3, 4]}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    tensors = load_file(adapter.adapter / "adapter_model.safetensors")
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    save_file(tensors | {name: torch.zeros(2, 8)}, tmp_path / "adapter_model.safetensors")

    with pytest.raises(Exception, match="is unsupported LoRA weight"):
        asked(adapter.base, str(tmp_path), enable_lora=True, max_lora_rank=8)
