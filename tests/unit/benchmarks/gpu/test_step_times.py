"""The forward pass whose steps `step_times` measures is a Llama's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.step_times import Llama, compare, measure_grid, shape_of

ROWS, CONTEXT, PROMPT = 3, 7, 5


@pytest.fixture(scope="module", params=[4, 2], ids=["one KV head a head", "grouped"])
def reference(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=request.param,
        vocab_size=50,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def copied(reference: LlamaForCausalLM, folder: Path) -> Llama:
    """Return a `Llama` with the weights of transformers' model."""
    reference.config.save_pretrained(folder)
    llama = Llama(shape_of(str(folder)), torch.device("cpu"), torch.float32)
    weights = reference.state_dict()
    for index, layer in enumerate(llama.layers):
        prefix = f"model.layers.{index}."

        def named(*names: str, prefix: str = prefix) -> torch.Tensor:
            return torch.cat([weights[f"{prefix}{name}_proj.weight"] for name in names])

        layer.qkv = named("self_attn.q", "self_attn.k", "self_attn.v")
        layer.output = named("self_attn.o")
        layer.gate_up, layer.down = named("mlp.gate", "mlp.up"), named("mlp.down")
    llama.embedding, llama.head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    return llama


@torch.inference_mode()
def test_a_step_computes_what_transformers_computes(
    reference: LlamaForCausalLM, tmp_path: Path
) -> None:
    llama = copied(reference, tmp_path)
    before = torch.randint(50, (ROWS, CONTEXT))
    last, prompt = torch.randint(50, (ROWS,)), torch.randint(50, (PROMPT,))
    cache = DynamicCache(config=reference.config)
    reference(before, past_key_values=cache)
    llama.make_cache(ROWS, CONTEXT + 1)
    layers: list[Any] = list(cache.layers)
    for index, layer in enumerate(layers):
        llama.keys[index][:, :, :CONTEXT] = layer.keys
        llama.values[index][:, :, :CONTEXT] = layer.values

    logits = llama.step(torch.cat([last, prompt]), rows=ROWS, context=CONTEXT)

    decoded = reference(torch.cat([before, last[:, None]], dim=1)).logits[:, -1]
    torch.testing.assert_close(logits[:ROWS], decoded, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[ROWS], reference(prompt[None]).logits[0, -1])


def test_a_grid_is_measured_and_compared(
    reference: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = copied(reference, tmp_path)

    times = measure_grid(llama, (1, 4), (8, 16), (6,), repeats=3)

    points = [(each.rows, each.context, each.prefill) for each in times]
    assert points == [(1, 8, 0), (4, 8, 0), (1, 16, 0), (4, 16, 0), (1, 8, 6), (4, 8, 6)]
    assert all(each.matrices_ms > 0 for each in times)
    predicted = compare("llama-7b", "a100-80gb", times)
    assert predicted[0]["predicted_matrices_ms"] == pytest.approx(9.3, rel=0.05)
    assert "rows    4, context    16" in capsys.readouterr().out
