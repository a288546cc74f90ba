"""The page on step costs has the numbers of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from apar_core.step_costs.files import read_costs
from apar_core.step_costs.gpus import GPUS, find_gpu
from apar_core.step_costs.models import MODELS, find_model
from apar_core.step_costs.predict import HOST_BASE_S, HOST_ROW_S, kv_tokens, step_costs

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "step-costs.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|")
]
HEADER = next(row for row in ROWS if row[0] == "Tokens in the step")
TABLES = [row for row in ROWS if re.match(r"Llama-[\w-]+, \w+", row[0])]


def test_every_published_table_is_on_the_page() -> None:
    assert len(TABLES) == 9
    for name, *cells in TABLES:
        model, gpu = name.lower().split(", ")
        costs = step_costs(find_model(model), find_gpu(gpu))
        assert "AIConfigurator" in costs.source
        for tokens, cell in zip(HEADER[1:], cells, strict=True):
            assert f"{1000 * costs.matrix_time_s(int(tokens)):.4g}" == cell


@pytest.mark.parametrize("term", ["attended_token_s", "row_s", "copied_block_s"])
def test_the_terms_of_llama_7b_are_those_of_the_code(term: str) -> None:
    row = next(row for row in ROWS if row[0] == f"`{term}`")
    stated = [float(each) for each in re.findall(r"[\d.]+", row[2])]
    costs = [step_costs(find_model("llama-7b"), find_gpu(gpu)) for gpu in ("a100", "h100", "h200")]

    for number, each in zip(stated, costs, strict=True):
        assert 1e6 * getattr(each, term) == pytest.approx(number, rel=0.04)


def test_engine_core_and_memory_are_those_of_the_code() -> None:
    assert f"{1e6 * HOST_BASE_S:g} us and {1e6 * HOST_ROW_S:g} us per row" in TEXT
    tokens = kv_tokens(find_model("llama-7b"), find_gpu("a100-80gb"))
    assert f"{tokens:,} tokens for Llama-7B on an A100-80GB" in TEXT


def test_every_name_is_on_the_page() -> None:
    for name in (*GPUS, *MODELS):
        assert f"`{name}`" in TEXT, name


def test_the_file_on_the_page_is_read(tmp_path: Path) -> None:
    [content] = re.findall(r"^```json\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (tmp_path / "costs.json").write_text(content)

    assert read_costs(tmp_path / "costs.json").name == json.loads(content)["name"]
