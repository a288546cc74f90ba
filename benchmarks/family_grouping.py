"""CPU time on the host to find the families of a step (`apar_core/attention`), in microseconds.

Rows have the blocks that forks give them: requests of one to eight threads, each forked from an
earlier thread of its request at some block. Other families than those of forks are in the step too:
with `system prompt`, all requests begin with the same eight blocks.
"""

from __future__ import annotations

import random
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from apar_core.attention.families import group_rows
from apar_core.attention.plan import StepPlanner
from apar_core.attention.settings import FamilySettings
from cluster.lab.experiments.settings import machine_name

BLOCK_SIZE = 16
# 2,048 positions in blocks of 16 tokens, as APAR's released checkpoints have them.
NUM_COLUMNS = 128
SYSTEM_BLOCKS = 8
NUM_ROWS = (64, 300, 900)
KINDS = ("forked", "forked, system prompt", "nothing shared")
GOAL_US = 200.0


def step(kind: str, num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block table and sequence lengths of a decoding step."""
    source = random.Random(seed)
    table = np.zeros((num_rows, NUM_COLUMNS), np.int32)
    next_block = iter(range(SYSTEM_BLOCKS + 1, 1 << 30))
    rows: list[list[int]] = []
    while len(rows) < num_rows:
        system = [*range(1, SYSTEM_BLOCKS + 1)] if "system" in kind else []
        prompt = [next(next_block) for _ in range(source.randint(4, 40))]
        threads = [[*system, *prompt, *(next(next_block) for _ in range(source.randint(1, 20)))]]
        while kind != "nothing shared" and len(threads) < source.randint(1, 8):
            parent = source.choice(threads)
            forked = source.randint(len(system) + len(prompt), len(parent))
            own = [next(next_block) for _ in range(source.randint(1, 12))]
            threads.append([*parent[:forked], *own])
        rows += [thread[:NUM_COLUMNS] for thread in threads]
    rows = rows[:num_rows]
    # Rows of a request do not lie together: places are given as threads come and go.
    source.shuffle(rows)
    for row, blocks in enumerate(rows):
        table[row, : len(blocks)] = blocks
    lens = [BLOCK_SIZE * (len(blocks) - 1) + source.randint(1, BLOCK_SIZE) for blocks in rows]
    return torch.from_numpy(table), torch.tensor(lens, dtype=torch.int32)


def measure(kind: str, num_rows: int, repeats: int) -> dict[str, Any]:
    """Time the grouping alone, and with what the host derives from it for the kernels."""
    steps = [step(kind, num_rows, seed) for seed in range(20)]
    ones = torch.ones(num_rows, dtype=torch.int32)
    settings = FamilySettings()
    planner: Any = StepPlanner.__new__(StepPlanner)
    planner.__dict__.update(
        counts=SimpleNamespace(steps=0, shared_steps=0, shared_rows=0, saved_blocks=0),
        _block_size=BLOCK_SIZE, _settings=settings, _is_active=True,
    )  # fmt: skip
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    times: dict[str, list[float]] = {"grouping": [], "plan": []}
    found = [
        group_rows(table, lens, ones, block_size=BLOCK_SIZE, settings=settings)
        for table, lens in steps
    ]
    for repeat in range(repeats):
        table, lens = steps[repeat % len(steps)]
        common: Any = SimpleNamespace(
            causal=True, mm_req_doc_ranges=None, num_reqs=num_rows, seq_lens=lens,
            query_start_loc_cpu=starts, block_table_tensor=table,
        )  # fmt: skip
        begin = time.thread_time()
        group_rows(table, lens, ones, block_size=BLOCK_SIZE, settings=settings)
        middle = time.thread_time()
        planner.plan(common)
        end = time.thread_time()
        times["grouping"].append(1e6 * (middle - begin))
        times["plan"].append(1e6 * (end - middle))
    saved = sum(each.num_saved_blocks for each in found)
    read = sum(int((lens - 1).div(BLOCK_SIZE, rounding_mode="floor").sum()) for _, lens in steps)
    return {
        "kind": kind,
        "rows": num_rows,
        "families": statistics.mean(each.num_families for each in found),
        "share_of_full_blocks_saved": saved / read,
        **{
            f"{name}_us": {
                "median": statistics.median(values),
                "p95": statistics.quantiles(values, n=20)[-1],
            }
            for name, values in times.items()
        },
    }


def run(console: Console, *, repeats: int) -> dict[str, Any]:
    """Measure all kinds and sizes of steps, and print a table."""
    torch.set_num_threads(1)
    begin = time.thread_time()
    measure("forked", 8, 20)
    compile_s = time.thread_time() - begin
    results = [measure(kind, rows, repeats) for kind in KINDS for rows in NUM_ROWS]
    table = Table(
        "step", "rows", "families", "blocks saved", "grouping us", "p95", "plan us", "p95"
    )
    for each in results:
        grouping, plan = each["grouping_us"], each["plan_us"]
        times = (grouping["median"], grouping["p95"], plan["median"], plan["p95"])
        table.add_row(
            each["kind"],
            str(each["rows"]),
            f"{each['families']:.1f}",
            f"{each['share_of_full_blocks_saved']:.0%}",
            *(f"{value:.0f}" for value in times),
        )
    console.print(table)
    goal = {"rows": 300, "grouping_us": GOAL_US}
    return {
        "machine": machine_name(),
        "clock": "CPU time of the thread",
        "goal": goal,
        "compile_s": compile_s,
        "repeats": repeats,
        "results": results,
    }
