"""Parallel Prompt Decoding in numbers that need no weights: exact sizes, and predictions for GPUs.

Sizes follow from a model's dimensions. Predictions take acceptance tables and step costs; on a GPU
nothing here was measured. Source: Parallel Prompt Decoding (arXiv 2405.18628), "the paper".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from apar_core.offline.speculation.acceptance import VICUNA_7B, VICUNA_13B, AcceptanceTable
from apar_core.offline.speculation.sparse_tree import (
    FAMILY_ROWS,
    DynamicTree,
    SizedTree,
    SparseTree,
    dynamic_tree,
    size_curve,
)
from apar_core.reporting import Cell, Column, ReportTable
from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import DTYPE_BYTES, ModelSize, find_model, model_of_config
from apar_core.step_costs.predict import WEIGHTS_BANDWIDTH_SHARE, step_costs

NUM_PROMPTS = 3
"""Prompt tokens of the paper's models, M."""

# ---- sizes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublishedSize:
    """Row of the paper's table 1: trained parameters, in percent of the model's.

    `prompt_share` is of prompt tokens and `medusa_share` of Medusa heads, None where not given.
    """

    name: str
    model: ModelSize
    prompt_share: float
    medusa_share: float | None


# Source: config.json of mtgv/MobileLLaMA-1.4B-Chat.
_MOBILE_LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "vocab_size": 32_000, "dtype": "float16",
}  # fmt: skip


def published_sizes() -> tuple[PublishedSize, ...]:
    """Return table 1's shares of trained parameters, with the models' dimensions."""
    mobile = model_of_config("MobileLLaMA-1.4B", _MOBILE_LLAMA, None, "its config.json")
    return (
        PublishedSize("MobileLLaMA", mobile, 4.50e-4, None),
        PublishedSize("Vicuna-7B", find_model("llama-7b"), 1.82e-4, 8.07),
        PublishedSize("Vicuna-13B", find_model("llama-13b"), 7.87e-5, 5.52),
    )


def prompt_parameters(model: ModelSize, num_prompts: int = NUM_PROMPTS, ensemble: int = 1) -> int:
    """Return the trained parameters of prompt tokens: one embedding for each EPT."""
    return num_prompts * ensemble * model.hidden_size


def medusa_parameters(
    model: ModelSize, num_heads: int, num_layers: int = 1, *, bias: bool = True
) -> int:
    """Return the parameters of Medusa heads: residual layers and a vocabulary matrix for each."""
    size = model.hidden_size
    return num_heads * (num_layers * (size * size + bias * size) + size * model.vocab_size)


def prompt_share(model: ModelSize, num_prompts: int = NUM_PROMPTS, ensemble: int = 1) -> float:
    """Return the trained parameters of prompt tokens as a share of the model's."""
    return prompt_parameters(model, num_prompts, ensemble) / model.parameters


def medusa_share(model: ModelSize, num_heads: int, num_layers: int = 1) -> float:
    """Return the parameters of Medusa heads as a share of the model's with its heads."""
    heads = medusa_parameters(model, num_heads, num_layers)
    return heads / (model.parameters + heads)


PAPER_MEDUSA_HEADS = 4
"""Heads that give table 1's 8.07% and 5.52%, one residual layer with bias each, relative to the
parameters of model and heads together."""


def trained_parameters_table() -> ReportTable:
    """Return the share of trained parameters next to the paper's table 1."""
    rows: list[tuple[Cell, ...]] = []
    for published in published_sizes():
        model = published.model
        rows.append(
            (
                published.name,
                float(prompt_parameters(model)),
                100 * prompt_share(model),
                published.prompt_share,
                100 * prompt_share(model, 2),
                None
                if published.medusa_share is None
                else 100 * medusa_share(model, PAPER_MEDUSA_HEADS),
                published.medusa_share,
            )
        )
    tiny = find_model("apar-tiny")
    rows.append(
        ("apar-tiny", float(prompt_parameters(tiny)), 100 * prompt_share(tiny), None,
         100 * prompt_share(tiny, 2), 100 * _tiny_medusa() / (tiny.parameters + _tiny_medusa()),
         None)
    )  # fmt: skip
    return ReportTable(
        "trained-parameters",
        "Trained parameters (table 1), in percent",
        (
            Column("Model"),
            Column("Parameters, M = 3", ",.0f"),
            Column("M = 3", ".3g"),
            Column("Paper", ".3g"),
            Column("M = 2", ".3g"),
            Column("Medusa heads", ".3g"),
            Column("Paper's Medusa", ".3g"),
        ),
        tuple(rows),
        "Counted. The paper's 13B value is that of two prompt tokens. Its Medusa values are those "
        "of four heads with one layer, relative to model and heads together. apar-tiny has two "
        "heads with two layers.",
    )


def _tiny_medusa() -> int:
    """Return the parameters of apar-tiny's Medusa heads."""
    return medusa_parameters(find_model("apar-tiny"), 2, 2, bias=False)


def memory_table(
    num_inputs: Sequence[tuple[str, int]] = (("1 + 34 + 71", 106), ("1 + 63", 64)),
) -> ReportTable:
    """Return the memory of prompt tokens and Medusa heads in bytes (figure 7).

    `num_inputs` has names and tokens of a pass, for the KV cache that a pass needs for guesses.
    """
    rows: list[tuple[Cell, ...]] = []
    for name in ("llama-7b", "llama-13b"):
        model = find_model(name)
        heads = medusa_parameters(model, PAPER_MEDUSA_HEADS) * DTYPE_BYTES[model.dtype]
        for dtype in ("float16", "float32"):
            prompts = prompt_parameters(model) * DTYPE_BYTES[dtype]
            rows.append(
                (f"{name}, prompt tokens in {dtype}", float(prompts),
                 100 * prompts / model.weight_bytes, 100 * prompts / heads)
            )  # fmt: skip
        rows.append(
            (f"{name}, 4 Medusa heads", float(heads), 100 * heads / model.weight_bytes, 100.0)
        )
        for shape, inputs in num_inputs:
            cache = (inputs - 1) * model.kv_bytes_per_token
            rows.append(
                (f"{name}, KV cache of {shape} inputs", float(cache),
                 100 * cache / model.weight_bytes, 100 * cache / heads)
            )  # fmt: skip
    tiny, heads = find_model("apar-tiny"), _tiny_medusa() * 2
    prompts = prompt_parameters(tiny) * 4
    rows.append(
        ("apar-tiny, prompt tokens in float32", float(prompts),
         100 * prompts / tiny.weight_bytes, 100 * prompts / heads)
    )  # fmt: skip
    rows.append(("apar-tiny, 2 Medusa heads", float(heads), 100 * heads / tiny.weight_bytes, 100.0))
    return ReportTable(
        "memory",
        "Memory beside the model (figure 7)",
        (
            Column("What"),
            Column("Bytes", ",.0f"),
            Column("% of the weights", ".3g"),
            Column("% of Medusa heads", ".3g"),
        ),
        tuple(rows),
        "Counted. The paper's 0.0004% of the weights and 0.004% of Medusa are those of 7B's prompt "
        "tokens in float32. They leave out the KV cache of the guesses, which a pass writes and "
        "mostly drops again.",
    )


# ---- acceptance of the paper's models ----------------------------------------------------------

PAPER_TABLES: Mapping[str, AcceptanceTable] = {"Vicuna-7B": VICUNA_7B, "Vicuna-13B": VICUNA_13B}

# Table 1: candidates and inputs of states 1 to 3 (without the last token), accepted tokens.
_PAPER_TREES = {
    "Vicuna-7B": ((10, 33, 34), (40, 105, 105), 2.54),
    "Vicuna-13B": ((10, 20, 20), (40, 60, 60), 2.44),
}
MEDUSA_LENGTH = {"Vicuna-7B": 2.51, "Vicuna-13B": 2.59}
"""Tokens per step of Medusa in table 1, with a tree of 63 candidates."""
_MEDUSA_INPUTS = 64


def paper_model(name: str) -> ModelSize:
    """Return the dimensions of "Vicuna-7B" or "Vicuna-13B"."""
    return find_model(name.lower().replace("vicuna", "llama"))


def paper_tree(model: str) -> DynamicTree:
    """Return the dynamic tree with the sizes of table 1 and the limits of the published trees."""
    candidates, inputs, _ = _PAPER_TREES[model]
    return dynamic_tree(
        PAPER_TABLES[model],
        (0, *candidates),
        (NUM_PROMPTS, *(total - kept for total, kept in zip(inputs, candidates, strict=True))),
        as_published=True,
    )


@dataclass(frozen=True, slots=True)
class PublishedSpeed:
    """Row of table 1: tokens per second, tokens per step, seconds of a pass, score, tree sizes."""

    model: str
    method: str
    throughput: float
    length: float
    pass_s: float
    quality: str | None
    candidates: str | None = None
    inputs: str = "1"


PUBLISHED_TABLE_1 = (
    PublishedSpeed("MobileLLaMA", "plain", 50.2, 1.00, 0.020, None),
    PublishedSpeed("MobileLLaMA", "ppd", 108.7, 2.43, 0.022, "Same", "10, 84, 89", "40, 285, 285"),
    PublishedSpeed("Vicuna-7B", "plain", 39.2, 1.00, 0.026, "5.99"),
    PublishedSpeed("Vicuna-7B", "medusa", 82.0, 2.51, 0.0307, "5.98", "63", "63"),
    PublishedSpeed("Vicuna-7B", "ppd", 88.0, 2.54, 0.029, "5.93", "10, 33, 34", "40, 105, 105"),
    PublishedSpeed("Vicuna-13B", "plain", 30.4, 1.00, 0.0330, "6.38"),
    PublishedSpeed("Vicuna-13B", "medusa", 63.4, 2.59, 0.0408, None, "63", "63"),
    PublishedSpeed("Vicuna-13B", "ppd", 66.1, 2.44, 0.0379, "6.32", "10, 20, 20", "40, 60, 60"),
)
"""Table 1 as published; the paper measured with transformers."""


def predicted_table_1(gpu: str, context: int) -> list[tuple[Cell, ...]]:
    """Return table 1's rows of Vicuna as predicted for a GPU, one answer at a time."""
    rows: list[tuple[Cell, ...]] = []
    for name, (candidates, inputs, _) in _PAPER_TREES.items():
        costs, tree = step_costs(paper_model(name), find_gpu(gpu)), paper_tree(name)
        found = predict_tree(costs, tree, 1, context)
        sizes = (", ".join(map(str, numbers)) for numbers in (candidates, inputs))
        where = f"predicted, {gpu}"
        rows += [
            (name, "plain", where, 1 / found.plain_s, 1.0, 1e3 * found.plain_s, None, None, "1"),
            (name, "ppd", where, found.expected_length / found.pass_s, found.expected_length,
             1e3 * found.pass_s, None, *sizes),
        ]  # fmt: skip
    return rows


def paper_trees_table() -> ReportTable:
    """Return table 1's tree sizes, with the expected tokens per step next to those it reports."""
    rows = []
    for model, (_, _, reported) in _PAPER_TREES.items():
        tree, table = paper_tree(model), PAPER_TABLES[model]
        free = dynamic_tree(
            table,
            tuple(each.num_candidates for each in tree.trees),
            tuple(each.num_prompts for each in tree.trees),
        )
        rows.append(
            (
                model,
                ", ".join(str(each.num_candidates) for each in tree.trees[1:]),
                ", ".join(str(each.num_inputs() - 1) for each in tree.trees[1:]),
                tree.expected_length(),
                free.expected_length(),
                reported,
            )
        )
    return ReportTable(
        "paper-trees",
        "The paper's tree sizes (table 1)",
        (
            Column("Model"),
            Column("Candidates of states 1 to 3"),
            Column("Inputs"),
            Column("Tokens per step, published limits", ".3f"),
            Column("any node may have prompts", ".3f"),
            Column("Paper, MT-Bench", ".2f"),
        ),
        tuple(rows),
        "Predicted from the authors' acceptance on Alpaca. The paper's values are of sampled "
        "answers, with typical acceptance. Inputs leave out the last token, as there.",
    )


# ---- a chain in vLLM ---------------------------------------------------------------------------

CHAIN_THRESHOLD = 1.15
"""Speed-up at batch 1 from which on a chain in vLLM would be worth implementing."""


CHAIN_HOST_S = (0.58e-3, 0.70e-3)
"""Host time of a step with a chain of 3 that a GPU would wait for: engine core and V1 model runner.

Measured at one row on this project's CPU while it was busy: first decile and median of all steps
(docs/experiments/2026-11-23-prompt-chain.md). The host of a GPU may be faster.
"""


def chain_tree(table: AcceptanceTable, num_drafts: int) -> DynamicTree:
    """Return chains instead of trees: what `apar_core/engine/prompt_chain.py` drafts in vLLM.

    A chain of `num_drafts` has the likeliest candidates, as many as there are but for one, and
    prompt tokens in the remaining places. Prompt tokens only help if the whole chain is accepted:
    in a causal sequence they cannot stand after a node before others.
    """
    most = table.num_distances
    trees = []
    for state in range(most + 1):
        length = min(state, num_drafts - 1)
        trees.append(
            SparseTree(
                tuple(max(node - 1, 0) for node in range(length + 1)),
                tuple(range(length + 1)),
                (0,) * (length + 1),
                (*(0,) * length, min(most, num_drafts - length)),
            )
        )
    return DynamicTree(tuple(trees), table)


@dataclass(frozen=True, slots=True)
class ChainPrediction:
    """Chain of prompt tokens in vLLM.

    `spare_s` is how much longer a step may be than predicted before the gain at batch 1 falls below
    the threshold; negative if it is below already.
    """

    num_drafts: int
    num_inputs: int
    expected_length: float
    plain_s: float
    chain_s: float

    @property
    def speedup(self) -> float:
        """Tokens per second relative to plain decoding."""
        return self.expected_length * self.plain_s / self.chain_s

    @property
    def spare_s(self) -> float:
        """Seconds that a step may take longer."""
        return self.expected_length * self.plain_s / CHAIN_THRESHOLD - self.chain_s


def predict_chain(
    costs: StepCosts,
    table: AcceptanceTable,
    num_drafts: int,
    rows: int,
    context: int,
    *,
    host_s: float | None = None,
) -> ChainPrediction:
    """Predict a chain in vLLM against plain decoding with async scheduling.

    vLLM 0.32 runs a custom proposer without async scheduling, because it takes sampled tokens on
    the CPU. So each step also takes the host's time: `host_s`, by default the engine core's.
    """
    tree = chain_tree(table, num_drafts)
    inputs = tree.num_inputs()
    return ChainPrediction(
        num_drafts,
        inputs,
        tree.expected_length(),
        costs.step_s(_batch(rows, 1, context), overlapped=True),
        costs.step_s(_batch(rows, inputs, context), overlapped=host_s is not None) + (host_s or 0),
    )


def medusa_chain_length(table: AcceptanceTable) -> float:
    """Return the expected tokens of a step when a top-1 chain is guessed after every token.

    So works vLLM's medusa method: heads read the hidden state of the last accepted token, whichever
    it is.
    """
    length = accepted = 1.0
    for row in table.probabilities:
        accepted *= row[0]
        length += accepted
    return length


def chain_table(context: int = 512, rows: Sequence[int] = (1, 8, 32)) -> ReportTable:
    """Return the prediction of a chain in vLLM for Llama-7B and -13B."""
    lines: list[tuple[Cell, ...]] = []
    for name, table in PAPER_TABLES.items():
        for gpu in ("a100-80gb", "h100", "h200"):
            costs = step_costs(paper_model(name), find_gpu(gpu))
            for drafts in (2, 3, 4):
                by_rows = [predict_chain(costs, table, drafts, r, context) for r in rows]
                first = by_rows[0]
                lines.append(
                    (f"{name}, {gpu}", float(drafts), float(first.num_inputs),
                     first.expected_length, 1e3 * first.plain_s, 1e3 * first.chain_s,
                     *(each.speedup for each in by_rows), 1e3 * first.spare_s)
                )  # fmt: skip
    seven = medusa_chain_length(VICUNA_7B)
    return ReportTable(
        "chain-in-vllm",
        "A chain of prompt tokens in vLLM, predicted",
        (
            Column("Model and GPU"),
            Column("Drafts", ".0f"),
            Column("Inputs", ".0f"),
            Column("Tokens per step", ".3f"),
            Column("Plain step (ms)", ".2f"),
            Column("Chain step (ms)", ".2f"),
            *(Column(f"Speed-up at {r} rows", ".2f") for r in rows),
            Column("Spare (ms)", ".2f"),
        ),
        tuple(lines),
        f"Context {context} tokens. Spare: a longer step at 1 row brings the speed-up below "
        f"{CHAIN_THRESHOLD}. Guesses after every accepted token, as of Medusa heads with the same "
        f"acceptance, would yield {seven:.2f} tokens per step with Vicuna-7B's table.",
    )


# ---- live rows on a GPU ------------------------------------------------------------------------


def _batch(rows: int, inputs: int, context: int) -> StepBatch:
    return StepBatch(rows, rows * context, prefill_tokens=rows * (inputs - 1))


@dataclass(frozen=True, slots=True)
class RowPrediction:
    """Prediction of one speculative method at a number of live rows.

    `num_inputs` are the tokens of a row in a pass, `expected_length` its tokens per pass. Seconds
    are those of a pass with all rows, and of one without speculation.
    """

    rows: int
    num_inputs: int
    expected_length: float
    pass_s: float
    plain_s: float

    @property
    def speedup(self) -> float:
        """Tokens per second relative to the same rows without speculation."""
        return self.expected_length * self.plain_s / self.pass_s


def predict_tree(
    costs: StepCosts,
    tree: DynamicTree,
    rows: int,
    context: int,
    *,
    ensemble: int = 1,
    heads_s: float = 0.0,
) -> RowPrediction:
    """Predict decoding with a fixed tree; `heads_s` are seconds of Medusa heads per pass."""
    inputs = tree.num_inputs(ensemble)
    return _row_prediction(costs, rows, context, inputs, tree.expected_length(), heads_s)


def predict_best(
    costs: StepCosts,
    table: AcceptanceTable,
    rows: int,
    context: int,
    *,
    ensemble: int = 1,
    heads_s: float = 0.0,
    max_inputs: int = 128,
) -> RowPrediction:
    """Predict decoding with the tree that is best for so many rows; with n = 1, without guesses."""
    predictions = predict_sizes(
        costs, table, rows, context, ensemble=ensemble, heads_s=heads_s, max_inputs=max_inputs
    )
    return max(predictions, key=lambda prediction: prediction.speedup)


def predict_sizes(
    costs: StepCosts,
    table: AcceptanceTable,
    rows: int,
    context: int,
    *,
    ensemble: int = 1,
    heads_s: float = 0.0,
    max_inputs: int = 128,
) -> list[RowPrediction]:
    """Predict decoding with the best tree of each size, smallest first; see `predict_best`."""
    return [
        _row_prediction(
            costs, rows, context, sized.num_inputs, sized.expected_length,
            heads_s if sized.num_inputs > 1 else 0.0,
        )
        for sized in _sizes(table, ensemble, max_inputs)
    ]  # fmt: skip


@lru_cache(maxsize=64)
def _sizes(table: AcceptanceTable, ensemble: int, max_inputs: int) -> tuple[SizedTree, ...]:
    """Return the best tree of each size; they do not depend on the duration of a pass."""
    return size_curve(table, lambda _tokens: 1.0, ensemble=ensemble, max_inputs=max_inputs)


def _row_prediction(
    costs: StepCosts, rows: int, context: int, inputs: int, length: float, extra_s: float
) -> RowPrediction:
    pass_s = costs.step_s(_batch(rows, inputs, context), overlapped=True) + extra_s
    plain_s = costs.step_s(_batch(rows, 1, context), overlapped=True)
    return RowPrediction(rows, inputs, length, pass_s, plain_s)


def medusa_heads_s(model: ModelSize, gpu_name: str, num_heads: int = PAPER_MEDUSA_HEADS) -> float:
    """Return the seconds in which a GPU reads the weights of Medusa heads once, in 16 bits."""
    num_bytes = 2 * medusa_parameters(model, num_heads)
    return num_bytes / (find_gpu(gpu_name).bandwidth * WEIGHTS_BANDWIDTH_SHARE)


@dataclass(frozen=True, slots=True)
class GpuPrediction:
    """Methods by number of live rows, for one model on one GPU."""

    name: str
    prompts: tuple[RowPrediction, ...]
    paper_prompts: tuple[RowPrediction, ...]
    medusa: tuple[RowPrediction, ...]


def predict_gpu(
    name: str, gpu: str, context: int, rows: Sequence[int] = FAMILY_ROWS
) -> GpuPrediction:
    """Predict PPD and Medusa for "Vicuna-7B" or "Vicuna-13B" on a GPU.

    Medusa's acceptance by rank is not published for these models: it has the tree and the tokens
    per step of table 1, whatever the rows.
    """
    model = paper_model(name)
    costs = step_costs(model, find_gpu(gpu))
    table, tree = PAPER_TABLES[name], paper_tree(name)
    heads_s = medusa_heads_s(model, gpu)
    return GpuPrediction(
        f"{name}, {gpu}",
        tuple(predict_best(costs, table, each, context) for each in rows),
        tuple(predict_tree(costs, tree, each, context) for each in rows),
        tuple(
            _row_prediction(costs, each, context, _MEDUSA_INPUTS, MEDUSA_LENGTH[name], heads_s)
            for each in rows
        ),
    )


def live_rows_table(predictions: Sequence[GpuPrediction], context: int) -> ReportTable:
    """Return speed-ups of speculation at 1 to 16 live rows."""
    lines = []
    for prediction in predictions:
        for best, paper, medusa in zip(
            prediction.prompts, prediction.paper_prompts, prediction.medusa, strict=True
        ):
            lines.append(
                (prediction.name, float(best.rows), 1e3 * best.plain_s,
                 float(best.num_inputs), best.expected_length, 1e3 * best.pass_s, best.speedup,
                 paper.expected_length, 1e3 * paper.pass_s, paper.speedup,
                 1e3 * medusa.pass_s, medusa.speedup)
            )  # fmt: skip
    return ReportTable(
        "gpu-live-rows",
        "Speculation by live rows on a GPU, predicted",
        (
            Column("Model and GPU"),
            Column("Rows", ".0f"),
            Column("Plain pass (ms)", ".2f"),
            Column("Best inputs per row", ".0f"),
            Column("Tokens per pass", ".2f"),
            Column("Pass (ms)", ".2f"),
            Column("Speed-up", ".2f"),
            Column("Paper's tree: tokens", ".2f"),
            Column("pass (ms)", ".2f"),
            Column("speed-up", ".2f"),
            Column("Medusa: pass (ms)", ".2f"),
            Column("Medusa: speed-up", ".2f"),
        ),
        tuple(lines),
        f"Rows are threads of one answer or requests in a batch, {context} tokens of context each. "
        "Speed-ups are relative to the same rows without speculation. Medusa has table 1's tree of "
        "63 and its tokens per step. Tree attention is taken to be as fast as causal attention.",
    )


def answer_speedups(
    costs: StepCosts,
    table: AcceptanceTable,
    live_rows: Sequence[Mapping[int, int]],
    sequential_steps: int,
    context: int,
    *,
    heads_s: float = 0.0,
    medusa_length: float | None = None,
) -> dict[str, float]:
    """Predict decoders on answers from the live rows of their steps, relative to `plain`.

    `live_rows` has, for each answer, how many steps of the schedule have so many live threads;
    `sequential_steps` are the steps of all texts as single threads. A step in which r threads gain
    a token takes L(r n) / tau(n) with speculation: tokens are spread evenly over passes, which
    leaves out that a thread may end within a pass.
    """
    steps: dict[int, int] = {}
    for answer in live_rows:
        for rows, number in answer.items():
            steps[rows] = steps.get(rows, 0) + number
    best = {rows: predict_best(costs, table, rows, context) for rows in {1, *steps}}
    plain_s = sequential_steps * best[1].plain_s
    seconds = {
        "plain": plain_s,
        "vanilla_apar": sum(number * best[rows].plain_s for rows, number in steps.items()),
        "ppd": sequential_steps * best[1].pass_s / best[1].expected_length,
        "ppd_apar": sum(
            number * best[rows].pass_s / best[rows].expected_length
            for rows, number in steps.items()
        ),
    }
    if medusa_length is not None:
        fixed = {
            rows: _row_prediction(costs, rows, context, _MEDUSA_INPUTS, medusa_length, heads_s)
            for rows in steps
        }
        seconds["medusa_apar"] = sum(
            number * fixed[rows].pass_s / medusa_length for rows, number in steps.items()
        )
    return {name: plain_s / each for name, each in seconds.items()}


def prediction_tables(context: int = 512) -> list[ReportTable]:
    """Return all tables that need neither weights nor answers."""
    gpus = [predict_gpu(name, gpu, context)
            for name in PAPER_TABLES
            for gpu in ("a100-40gb", "rtx-4090", "a100-80gb", "h100", "h200")
            if paper_model(name).weight_bytes < find_gpu(gpu).memory_bytes]  # fmt: skip
    return [
        trained_parameters_table(),
        memory_table(),
        paper_trees_table(),
        chain_table(context),
        live_rows_table(gpus, context),
    ]
