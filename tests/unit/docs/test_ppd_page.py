"""The page on Parallel Prompt Decoding has the numbers of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from apar_core.offline.evaluation.ppd_predictions import (
    CHAIN_HOST_S,
    CHAIN_THRESHOLD,
    PAPER_MEDUSA_HEADS,
    PAPER_SHARES,
    PAPER_TABLES,
    medusa_chain_length,
    medusa_parameters,
    paper_model,
    paper_tree,
    predict_best,
    predict_chain,
    predict_gpu,
    predicted_table_1,
    prompt_parameters,
    prompt_share,
)
from apar_core.offline.speculation.acceptance import VICUNA_7B
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import step_costs

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "ppd.md").read_text(encoding="utf-8")
FLAT = " ".join(TEXT.split())
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|")
]


def row(name: str) -> list[str]:
    [found] = [cells for cells in ROWS if cells[0] == name]
    return found[1:]


def test_shares_of_trained_parameters_are_counted() -> None:
    named = {
        "MobileLLaMA-1.4B": PAPER_SHARES["MobileLLaMA"][0],
        "Vicuna-7B": paper_model("Vicuna-7B"),
        "Vicuna-13B": paper_model("Vicuna-13B"),
        "apar-tiny": find_model("apar-tiny"),
    }
    for name, model in named.items():
        assert row(name)[0] == f"{100 * prompt_share(model):.2e} %"


def test_bytes_are_counted() -> None:
    model = paper_model("Vicuna-7B")
    for number in (
        4 * prompt_parameters(model),
        2 * medusa_parameters(model, PAPER_MEDUSA_HEADS),
        105 * model.kv_bytes_per_token,
        63 * model.kv_bytes_per_token,
    ):
        assert f"{number:,} bytes" in FLAT


def test_tokens_per_step_of_the_paper_s_trees_are_those_of_the_code() -> None:
    assert f"yield {paper_tree('Vicuna-7B').expected_length():.2f} tokens per step" in FLAT


@pytest.mark.parametrize(
    ("gpu", "title"),
    [
        ("a100-80gb", "A100-80GB"),
        ("h100", "H100"),
        ("a100-40gb", "A100-40GB"),
        ("rtx-4090", "RTX 4090"),
    ],
)
def test_live_rows_are_those_of_the_code(gpu: str, title: str) -> None:
    start = TEXT.index(f"| Vicuna-7B on {title}, live rows |")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")][1:]
        for line in TEXT[start:].splitlines()[2:5]
    ]
    found = predict_gpu("Vicuna-7B", gpu, 512)

    assert lines[0] == [str(best.num_inputs) for best, _, _ in found]
    assert lines[1] == [f"{best.speedup:.2f}" for best, _, _ in found]
    assert lines[2] == [f"{paper.speedup:.2f}" for _, paper, _ in found]


def test_table_1_is_that_of_the_code() -> None:
    plain, prompted = predicted_table_1("a100-40gb", 512)[:2]
    assert isinstance(plain[3], float)
    assert isinstance(plain[5], float)
    assert isinstance(prompted[3], float)
    assert f"Predicted are {plain[3]:.1f} tokens/s plain and {prompted[3]:.0f} with" in FLAT
    assert f"in passes of {plain[5]:.1f} ms" in FLAT
    assert f"the predicted one {prompted[3] / plain[3]:.2f}" in FLAT


def test_many_live_rows_are_those_of_the_code() -> None:
    rows = [int(cell) for cell in row("Speed-up of Vicuna-7B with the best tree, live rows")]
    for title, gpu in (("A100-80GB", "a100-80gb"), ("H100", "h100"), ("H200", "h200")):
        costs = step_costs(paper_model("Vicuna-7B"), find_gpu(gpu))
        found = [predict_best(costs, VICUNA_7B, number, 512).speedup for number in rows]
        assert row(title) == [f"{speedup:.2f}" for speedup in found]


def test_the_chain_is_that_of_the_code() -> None:
    for name, table in PAPER_TABLES.items():
        for place, gpu in enumerate(("a100-80gb", "h100", "h200")):
            costs = step_costs(paper_model(name), find_gpu(gpu))
            chain = predict_chain(costs, table, 3, rows=1, context=512)
            assert row(f"{name}, chain of 3: speed-up")[place] == f"{chain.speedup:.2f}"
            for host_s in CHAIN_HOST_S:
                slow = predict_chain(costs, table, 3, rows=1, context=512, host_s=host_s)
                title = f"{name}, with {1e3 * host_s:.2f} ms of host time"
                assert row(title)[place] == f"{slow.speedup:.2f}"
            if name == "Vicuna-7B":
                spare = row(f"{name}, chain of 3: spare time per step (ms)")[place]
                assert spare == f"{1e3 * chain.spare_s:.2f}"
    assert f"limit of {CHAIN_THRESHOLD}" in FLAT
    assert re.search(rf"would yield {medusa_chain_length(VICUNA_7B):.2f} tokens per step", FLAT)
