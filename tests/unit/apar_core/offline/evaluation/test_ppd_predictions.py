"""Sizes next to the paper's, and predictions next to closed forms."""

from __future__ import annotations

import pytest

from apar_core.offline.evaluation.ppd_predictions import (
    PAPER_MEDUSA_HEADS,
    PAPER_SHARES,
    PAPER_TABLES,
    answer_speedups,
    chain_tree,
    heads_share,
    medusa_chain_length,
    medusa_parameters,
    paper_tree,
    predict_best,
    predict_chain,
    predict_gpu,
    prediction_tables,
    prompt_parameters,
    prompt_share,
)
from apar_core.offline.speculation.acceptance import VICUNA_7B, AcceptanceTable
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.step_costs.predict import step_costs

# A pass of 10 ms up to 8 tokens, then in proportion; nothing else costs time.
FLAT = StepCosts("flat", "predicted", "test", ((1, 0.01), (8, 0.01)), 0.0)
TABLE = AcceptanceTable(
    probabilities=((0.6, 0.2), (0.5, 0.1)), observations=(100, 100), source="test"
)


def significant(value: float, digits: int = 3) -> str:
    return f"{value:.{digits - 1}e}"


@pytest.mark.parametrize("name", PAPER_SHARES)
def test_trained_parameters_are_those_of_table_1(name: str) -> None:
    model, published, _ = PAPER_SHARES[name]
    # The paper's 13B value is that of two prompt tokens.
    num_prompts = 2 if name == "Vicuna-13B" else 3

    assert significant(100 * prompt_share(model, num_prompts)) == significant(published)


def test_three_prompt_tokens_of_13b_are_not_what_table_1_says() -> None:
    assert significant(100 * prompt_share(find_model("llama-13b"))) == "1.18e-04"


@pytest.mark.parametrize(("size", "paper"), [("llama-7b", 8.07), ("llama-13b", 5.52)])
def test_medusa_parameters_of_table_1_are_four_heads(size: str, paper: float) -> None:
    model = find_model(size)

    assert round(100 * heads_share(model, medusa_parameters(model, PAPER_MEDUSA_HEADS)), 2) == paper


def test_memory_of_figure_7_is_that_of_float32_prompts() -> None:
    model = find_model("llama-7b")
    heads = 2 * medusa_parameters(model, PAPER_MEDUSA_HEADS)

    assert f"{100 * 4 * prompt_parameters(model) / model.weight_bytes:.4f}" == "0.0004"
    assert f"{100 * 4 * prompt_parameters(model) / heads:.3f}" == "0.004"


def test_parameters_of_the_embedded_model_are_counted() -> None:
    tiny = find_model("apar-tiny")

    assert prompt_parameters(tiny) == 3 * 256
    assert f"{100 * prompt_share(tiny):.3f}" == "0.018"
    # Two heads: two layers of 256 x 256 without bias, and a vocabulary matrix of 4,096 x 256.
    assert medusa_parameters(tiny, 2, 2, bias=False) == 2 * (2 * 65_536 + 1_048_576)


@pytest.mark.parametrize(
    ("model", "inputs"), [("Vicuna-7B", (40, 105, 105)), ("Vicuna-13B", (40, 60, 60))]
)
def test_trees_have_the_sizes_of_table_1(model: str, inputs: tuple[int, ...]) -> None:
    # The paper leaves out the last token.
    assert tuple(tree.num_inputs() - 1 for tree in paper_tree(model).trees[1:]) == inputs


@pytest.mark.parametrize("accepted", [0.0, 0.3, 0.47, 1.0])
def test_a_chain_of_one_candidate_has_its_closed_form(accepted: float) -> None:
    table = AcceptanceTable(probabilities=((accepted,),), observations=(1,), source="test")
    # A right guess is followed by a step with guesses, a wrong one by a step without.
    expected = 1 + accepted / (2 - accepted)

    assert chain_tree(table, 2).expected_length() == pytest.approx(expected)


def test_a_chain_has_prompt_tokens_behind_its_end_only() -> None:
    tree = chain_tree(VICUNA_7B, 3)

    # As `engine/prompt_chain.py` drafts: one prompt token at least, and three drafts in all.
    assert [each.prompts for each in tree.trees] == [(3,), (0, 2), (0, 0, 1), (0, 0, 1)]
    assert tree.num_inputs() == 4


def test_a_chain_pays_for_the_time_that_async_scheduling_hides() -> None:
    costs = StepCosts("host", "predicted", "test", ((1, 0.01), (64, 0.01)), 0.0, host_base_s=0.002)

    chain = predict_chain(costs, TABLE, 2, rows=1, context=0)

    assert chain.plain_s == pytest.approx(0.010)
    assert chain.pass_s == pytest.approx(0.012)
    slow_host = predict_chain(costs, TABLE, 2, rows=1, context=0, host_s=0.003)
    assert slow_host.pass_s == pytest.approx(0.013)
    slower = chain.expected_length * chain.plain_s / (chain.pass_s + chain.spare_s)
    assert slower == pytest.approx(1.15)


def test_heads_behind_every_token_beat_a_chain() -> None:
    assert medusa_chain_length(TABLE) == pytest.approx(1 + 0.6 + 0.6 * 0.5)
    for table in PAPER_TABLES.values():
        best = max(chain_tree(table, drafts).expected_length() for drafts in (2, 3, 6))
        assert medusa_chain_length(table) > best


def test_the_prediction_of_a_chain_exceeds_its_threshold_on_every_gpu() -> None:
    for gpu in ("a100-80gb", "h100", "h200"):
        costs = step_costs(find_model("llama-7b"), find_gpu(gpu))
        assert 1.15 < predict_chain(costs, VICUNA_7B, 3, rows=1, context=512).speedup < 1.35


def test_more_live_rows_leave_less_for_guesses() -> None:
    costs = step_costs(find_model("llama-7b"), find_gpu("a100-80gb"))
    predictions = [predict_best(costs, VICUNA_7B, rows, 512) for rows in (1, 2, 4, 8, 16)]

    assert [each.num_inputs for each in predictions] == sorted(
        (each.num_inputs for each in predictions), reverse=True
    )
    speedups = [each.speedup for each in predictions]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[-1] >= 1


def test_a_tree_for_one_row_slows_many_rows_down() -> None:
    papers = [paper.speedup for _, paper, _ in predict_gpu("Vicuna-7B", "a100-80gb", 512)]

    assert len(papers) == 5
    assert papers[0] > 1.5
    assert papers[-1] < 0.5


def test_answers_take_the_time_of_their_live_rows() -> None:
    never = AcceptanceTable(probabilities=((0.0,),), observations=(1,), source="test")

    speedups = answer_speedups(FLAT, never, [{1: 10, 4: 5}, {1: 5}], 50, 0)

    # 20 passes instead of 50; guesses that are never right leave plain passes.
    assert speedups == pytest.approx(
        {"plain": 1.0, "ppd": 1.0, "vanilla_apar": 2.5, "ppd_apar": 2.5}
    )


def test_guesses_and_forks_multiply_while_passes_are_free() -> None:
    certain = AcceptanceTable(probabilities=((1.0,),), observations=(1,), source="test")

    speedups = answer_speedups(FLAT, certain, [{2: 10}], 20, 0)

    # Two rows of last token, candidate and prompt tokens fit in 8 tokens.
    assert speedups["ppd"] == pytest.approx(2.0)
    assert speedups["ppd_apar"] == pytest.approx(4.0)


def test_every_table_can_be_shown() -> None:
    for table in prediction_tables(512):
        assert table.rows
        assert "|" in table.as_markdown()
