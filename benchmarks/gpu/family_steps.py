"""Record what steps of the virtual engine read, for the GPU check of family attention.

    python -m benchmarks.gpu.family_steps --trace structured.jsonl --mixed-trace mixed.jsonl

Of each run, it keeps one step without its prompts: half of the tokens that the run's decoding rows
attend to are attended to in steps with at least as many rows. The file has block numbers and
lengths only, no text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]

FILE = Path(__file__).with_name("family_steps.npz")
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of a model: heads, KV heads, head size, and layers."""

    heads: int
    kv_heads: int
    head_size: int
    layers: int


SHAPES = {
    "llama-7b": Shape(32, 32, 128, 32),
    "llama-13b": Shape(40, 40, 128, 40),
    "llama-3-8b": Shape(32, 8, 128, 32),
}


@dataclass(frozen=True)
class Step:
    """A step of rows that decode one token each.

    table: int32 [R, B], blocks numbered from 0; what stands after a row's last block is -1.
    lengths: int32 [R], tokens that a row attends to.
    """

    name: str
    model: str
    source: str
    table: Ints
    lengths: Ints


def read_steps(path: Path = FILE) -> list[Step]:
    """Return the recorded steps."""
    with np.load(path) as file:
        heads = json.loads(str(file["steps"]))
        return [
            Step(**head, table=file[f"{head['name']} table"].astype(np.int32),
                 lengths=file[f"{head['name']} lengths"])
            for head in heads
        ]  # fmt: skip


def write_steps(steps: list[Step], path: Path) -> None:
    """Write steps to a compressed file."""
    arrays: dict[str, Any] = {}
    heads = []
    for step in steps:
        head = asdict(step)
        # Differences compress well: most blocks of a row were allocated one after the other.
        arrays[f"{step.name} table"] = head.pop("table")
        arrays[f"{step.name} lengths"] = head.pop("lengths")
        heads.append(head)
    np.savez_compressed(path, steps=np.array(json.dumps(heads)), **arrays)


def numbered(tables: list[Ints]) -> Ints:
    """Return the blocks of rows as a table, numbered in the order in which they appear."""
    numbers: dict[int, int] = {}
    table = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = [
            numbers.setdefault(block, len(numbers)) for block in blocks.tolist()
        ]
    return table


def record(traces: dict[str, Path], runs: dict[str, dict[str, Any]]) -> list[Step]:
    """Do runs in virtual time, and return a step of each. `runs` are keys by name of the step."""
    from cluster.lab.experiments.runs import Worker
    from cluster.lab.experiments.settings import ExperimentSettings, RunKey
    from cluster.lab.virtual.executor import VirtualExecutor

    # Per step: the blocks and the tokens of each decoding row.
    seen: list[list[tuple[Ints, int]]] = []
    charge = VirtualExecutor._charge

    def noted(self: Any, step: Any, names: Sequence[str], ends: Sequence[int]) -> None:
        rows = [
            (self._tables.ids[self._rows[name].slot, : -(-end // BLOCK_SIZE)].copy(), end)
            for name, end in zip(names, ends, strict=True)
            if step.num_scheduled_tokens[name] == 1
        ]
        seen.append(rows)
        charge(self, step, names, ends)

    VirtualExecutor._charge = noted
    settings = ExperimentSettings(
        trace=traces["structured"], mixed_trace=traces["mixed"], models=tuple(SHAPES),
        gpus=("a100-80gb",),
    )  # fmt: skip
    worker = Worker(settings)
    steps = []
    for name, fields in sorted(runs.items(), key=lambda run: str(run[1]["model"])):
        seen.clear()
        key = RunKey(device="a100-80gb", **fields)
        worker.run(key)
        typical = _typical(seen)
        lengths = [length for _, length in typical]
        table = numbered([blocks for blocks, _ in typical])
        steps.append(Step(name, key.model, key.title, table, np.array(lengths, np.int32)))
        print(f"{name}: {len(lengths)} rows, {sum(lengths)} tokens, {table.max() + 1} blocks of "
              f"{sum(-(-each // BLOCK_SIZE) for each in lengths)} read", flush=True)  # fmt: skip
    worker.close()
    VirtualExecutor._charge = charge
    order = list(runs)
    return sorted(steps, key=lambda step: order.index(step.name))


def _typical(steps: list[list[tuple[Ints, int]]]) -> list[tuple[Ints, int]]:
    """Return the median step by rows, weighted by the tokens that a step attends to."""
    ordered = sorted(steps, key=len)
    tokens = [sum(length for _, length in step) for step in ordered]
    half, index = sum(tokens) / 2, 0
    while (half := half - tokens[index]) > 0:
        index += 1
    return ordered[index]


RUNS: dict[str, dict[str, Any]] = {
    "7B, 0.9": {"model": "llama-7b", "method": "eager", "kv_share": 0.9, "concurrency": 350},
    "7B, 0.3": {"model": "llama-7b", "method": "eager", "kv_share": 0.3, "concurrency": 350},
    "7B, 0.1": {"model": "llama-7b", "method": "eager", "kv_share": 0.1, "concurrency": 350},
    "7B, mixed": {
        "model": "llama-7b", "method": "eager", "kv_share": 0.9, "concurrency": 350,
        "trace": "mixed",
    },
    "7B, no forks": {
        "model": "llama-7b", "method": "sequential", "kv_share": 0.9, "concurrency": 350,
    },
    "7B, 8 at once": {
        "model": "llama-7b", "method": "eager", "kv_share": 0.9, "concurrency": 8,
        "is_closed_loop": True,
    },
    "7B, 1 at once": {
        "model": "llama-7b", "method": "eager", "kv_share": 0.9, "concurrency": 1,
        "is_closed_loop": True,
    },
    "13B, 0.9": {"model": "llama-13b", "method": "eager", "kv_share": 0.9, "concurrency": 180},
    "Llama-3-8B, 0.9": {
        "model": "llama-3-8b", "method": "eager", "kv_share": 0.9, "concurrency": 350,
    },
}  # fmt: skip
"""The recorded steps: a predicted A100 with 80 GB."""


def main() -> None:
    """Record the steps and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--mixed-trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    traces = {"structured": options.trace, "mixed": options.mixed_trace}
    steps = record(traces, RUNS)
    write_steps(steps, options.out)


if __name__ == "__main__":
    main()
