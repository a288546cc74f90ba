"""Measure steps of a Llama with random weights on a GPU: a check of the tables of step costs.

Needs torch, and transformers for configurations other than the built-in ones. It does not need
vLLM: copy this file to any machine with a GPU and run

    python step_times.py --model llama-7b --out step-times.json

A step has rows that decode with a KV cache of their own, and optionally a prompt. The forward pass
is the plain one: bf16, fused QKV and gate-up matrices, `scaled_dot_product_attention`, logits of
the sampled rows only. It is captured as a CUDA graph, as vLLM does, and also timed without. Each
point is measured whole and with attention left out; the difference is the attention's time.

With this repository on the path, the times are also compared with the table that predictions use.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LLAMA_7B = {
    "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32_000,
}  # fmt: skip
CONFIGS: dict[str, dict[str, int]] = {
    "llama-7b": _LLAMA_7B,
    "llama-13b": {
        **_LLAMA_7B, "hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "llama-3-8b": {
        **_LLAMA_7B, "intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 128_256,
    },
}  # fmt: skip
ROWS = (1, 8, 32, 64, 128, 192, 256, 384, 512)
CONTEXTS = (128, 512, 1024)
PREFILL = (64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of a token in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


def shape_of(name_or_path: str) -> Shape:
    """Return the dimensions of a built-in model, or of a model that transformers knows."""
    config: Any = CONFIGS.get(name_or_path)
    if config is None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(name_or_path).to_dict()
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return Shape(
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


@dataclass(slots=True)
class Layer:
    """Weights of a layer, as `functional.linear` takes them: [outputs, inputs]."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    inner_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """A Llama with random weights and a static KV cache, one step at a time."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        def matrix(outputs: int, inputs: int) -> Tensor:
            return torch.randn(outputs, inputs, device=device, dtype=dtype).mul_(0.02)

        self.shape, self.device, self.dtype = shape, device, dtype
        hidden, head_dim = shape.hidden, shape.head_dim
        ones = torch.ones(hidden, device=device, dtype=dtype)
        self.layers = [
            Layer(
                ones,
                matrix((shape.heads + 2 * shape.kv_heads) * head_dim, hidden),
                matrix(hidden, shape.heads * head_dim),
                ones,
                matrix(2 * shape.inner, hidden),
                matrix(hidden, shape.inner),
            )
            for _ in range(shape.layers)
        ]
        self.embedding = matrix(shape.vocabulary, hidden)
        self.final_norm = ones
        self.head = matrix(shape.vocabulary, hidden)
        exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        self._frequencies = shape.rope_theta**-exponents
        # Per layer: keys and values [rows, KV heads, positions, head size].
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def make_cache(self, rows: int, positions: int) -> None:
        """Allocate the KV cache of the decoding rows, with random content."""
        size = (rows, self.shape.kv_heads, positions, self.shape.head_dim)
        self.keys, self.values = (
            [torch.randn(size, device=self.device, dtype=self.dtype) for _ in self.layers]
            for _ in range(2)
        )

    def step(
        self, token_ids_T: Tensor, *, rows: int, context: int, has_attention: bool = True
    ) -> Tensor:
        """Compute a step, and return the logits of the rows and of the prompt's last token.

        The first `rows` tokens are one of each row, at position `context`. The others are a prompt
        from position 0.
        """
        shape = self.shape
        prompt = len(token_ids_T) - rows
        positions_T = torch.cat(
            [
                torch.full((rows,), context, device=self.device),
                torch.arange(prompt, device=self.device),
            ]
        )
        angles = positions_T[:, None].float() * self._frequencies
        rotation = torch.cat([angles, angles], dim=-1)[:, None]
        cosine, sine = rotation.cos().to(self.dtype), rotation.sin().to(self.dtype)
        states = functional.embedding(token_ids_T, self.embedding)
        sizes = [shape.heads * shape.head_dim] + 2 * [shape.kv_heads * shape.head_dim]
        for index, layer in enumerate(self.layers):
            normed = functional.rms_norm(states, (shape.hidden,), layer.input_norm, shape.norm_eps)
            query, key, value = functional.linear(normed, layer.qkv).split(sizes, dim=-1)
            if has_attention:
                attended = self._attention(
                    index,
                    _rotated(query.unflatten(-1, (shape.heads, -1)), cosine, sine),
                    _rotated(key.unflatten(-1, (shape.kv_heads, -1)), cosine, sine),
                    value.unflatten(-1, (shape.kv_heads, -1)),
                    rows,
                    context,
                )
            else:
                attended = query
            states = states + functional.linear(attended, layer.output)
            normed = functional.rms_norm(states, (shape.hidden,), layer.inner_norm, shape.norm_eps)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            states = states + functional.linear(functional.silu(gate) * up, layer.down)
        sampled = states[:rows] if prompt == 0 else torch.cat([states[:rows], states[-1:]])
        normed = functional.rms_norm(sampled, (shape.hidden,), self.final_norm, shape.norm_eps)
        return functional.linear(normed, self.head)

    def _attention(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, rows: int, context: int
    ) -> Tensor:
        """Write keys and values [tokens, heads, head size] of the rows, and attend."""
        attend = functional.scaled_dot_product_attention
        is_grouped = self.shape.heads != self.shape.kv_heads
        found = []
        if rows:
            keys, values = self.keys[index], self.values[index]
            keys[:, :, context] = key[:rows]
            values[:, :, context] = value[:rows]
            end = context + 1
            decoded = attend(
                query[:rows, :, None], keys[:, :, :end], values[:, :, :end], enable_gqa=is_grouped
            )
            found.append(decoded.flatten(1))
        if len(query) > rows:
            asked, keys, values = (
                each[rows:].transpose(0, 1)[None] for each in (query, key, value)
            )
            own = attend(asked, keys, values, is_causal=True, enable_gqa=is_grouped)
            found.append(own[0].transpose(0, 1).flatten(1))
        return torch.cat(found)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds of a step: as a CUDA graph, without attention, and without a graph.

    attention_bandwidth: bytes of KV cache per second of the attention's time, as a rate.
    """

    rows: int
    context: int
    prefill: int
    step_ms: float
    matrices_ms: float
    eager_ms: float | None
    attention_bandwidth: float | None


def measure(llama: Llama, rows: int, context: int, prefill: int, repeats: int) -> StepTime:
    """Measure a step of rows that attend to a context each, with a prompt beside them."""
    llama.make_cache(rows, context + 1)
    vocabulary = llama.shape.vocabulary
    token_ids = torch.randint(vocabulary, (rows + prefill,), device=llama.device)

    def whole() -> Tensor:
        return llama.step(token_ids, rows=rows, context=context)

    def matrices() -> Tensor:
        return llama.step(token_ids, rows=rows, context=context, has_attention=False)

    on_gpu = llama.device.type == "cuda"
    step_s = _median_s(_captured(whole) if on_gpu else whole, on_gpu, repeats)
    matrices_s = _median_s(_captured(matrices) if on_gpu else matrices, on_gpu, repeats)
    eager_s = _median_s(whole, on_gpu, repeats) if on_gpu else None
    llama.keys, llama.values = [], []
    attention_s = step_s - matrices_s
    read_bytes = rows * (context + 1) * llama.shape.kv_bytes_per_token
    return StepTime(
        rows,
        context,
        prefill,
        1000 * step_s,
        1000 * matrices_s,
        None if eager_s is None else 1000 * eager_s,
        read_bytes / attention_s if attention_s > 0 and not prefill else None,
    )


def _captured(function: Callable[[], Tensor]) -> Callable[[], Any]:
    """Return the function as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def _median_s(function: Callable[[], Any], on_gpu: bool, repeats: int) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1000)
        else:
            began_s = time.perf_counter()
            function()
            times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def measure_grid(
    llama: Llama,
    rows: tuple[int, ...],
    contexts: tuple[int, ...],
    prefill: tuple[int, ...],
    repeats: int,
) -> list[StepTime]:
    """Measure rows x contexts without a prompt, and rows x prefill at the shortest context.

    Points whose KV cache does not fit into the memory are left out.
    """
    points = [(number, context, 0) for context in contexts for number in rows]
    points += [(number, min(contexts), tokens) for tokens in prefill for number in rows]
    times = []
    for number, context, tokens in points:
        try:
            with torch.inference_mode():
                times.append(measure(llama, number, context, tokens, repeats))
        except torch.cuda.OutOfMemoryError:
            point = f"rows {number}, context {context}, prefill {tokens}"
            print(f"does not fit into memory: {point}", flush=True)
            llama.keys, llama.values = [], []
        else:
            print(_line(times[-1]), flush=True)
        if llama.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return times


def _line(found: StepTime) -> str:
    eager = "" if found.eager_ms is None else f", without graph {found.eager_ms:.2f} ms"
    rate = found.attention_bandwidth
    bandwidth = "" if rate is None else f", attention reads {rate / 1e12:.3f} TB/s"
    return (
        f"rows {found.rows:4}, context {found.context:5}, prefill {found.prefill:5}: "
        f"{found.step_ms:7.2f} ms, matrices {found.matrices_ms:7.2f} ms{eager}{bandwidth}"
    )


def compare(model: str, gpu: str, times: list[StepTime]) -> list[dict[str, float]]:
    """Print measured over predicted times, and return them; needs this repository."""
    from apar_core.step_costs.costs import StepBatch
    from apar_core.step_costs.gpus import find_gpu
    from apar_core.step_costs.models import find_model
    from apar_core.step_costs.predict import step_costs

    costs = step_costs(find_model(model), find_gpu(gpu))
    print(f"\nPredicted: {costs.source}")
    found = []
    for each in times:
        # A prompt is a row more; its other tokens are prefill.
        rows = each.rows + (each.prefill > 0)
        attended = each.rows * (each.context + 1) + each.prefill
        batch = StepBatch(rows, attended, max(each.prefill - 1, 0))
        step_ms, matrix_ms = 1000 * costs.device_s(batch), 1000 * costs.matrix_time_s(batch.tokens)
        found.append({"predicted_step_ms": step_ms, "predicted_matrices_ms": matrix_ms})
        print(
            f"rows {each.rows:4}, context {each.context:5}, prefill {each.prefill:5}: step "
            f"{each.step_ms:.2f} ms, predicted {step_ms:.2f} ({step_ms / each.step_ms - 1:+.0%}); "
            f"matrices {each.matrices_ms:.2f} ms, predicted {matrix_ms:.2f} "
            f"({matrix_ms / each.matrices_ms - 1:+.0%})"
        )
    return found


def main() -> None:
    """Measure, write the file, and compare if a GPU of the tables is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-7b", help="built-in name, or a model of the hub")
    parser.add_argument("--out", type=Path, default=Path("gpu-step-times.json"))
    parser.add_argument("--rows", type=_numbers, default=ROWS)
    parser.add_argument("--contexts", type=_numbers, default=CONTEXTS)
    parser.add_argument("--prefill", type=_numbers, default=PREFILL)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--gpu", help="compare with the table of this GPU, for example a100-80gb")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    llama = Llama(shape_of(arguments.model), device, torch.bfloat16)
    times = measure_grid(
        llama, arguments.rows, arguments.contexts, arguments.prefill, arguments.repeats
    )
    data: dict[str, Any] = {
        "model": arguments.model,
        "shape": asdict(llama.shape),
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "torch": torch.__version__,
        "repeats": arguments.repeats,
        "steps": [asdict(each) for each in times],
    }
    if arguments.gpu:
        data["compared_with"] = arguments.gpu
        data["predicted"] = compare(arguments.model, arguments.gpu, times)
    arguments.out.write_text(json.dumps(data, indent=1), encoding="utf-8")
    print(f"\nWritten: {arguments.out}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
