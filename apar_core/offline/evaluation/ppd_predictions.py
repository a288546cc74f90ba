"""Parallel Prompt Decoding in numbers that need no weights: exact sizes, and predictions for GPUs.

Sizes follow from a model's dimensions. Predictions take acceptance tables and step costs; on a GPU
nothing here was measured. Source: Parallel Prompt Decoding (arXiv 2405.18628), "the paper".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from apar_core.offline.evaluation.layout import columns
from apar_core.offline.speculation.acceptance import VICUNA_7B, VICUNA_13B, AcceptanceTable
from apar_core.offline.speculation.sparse_tree import (
    FAMILY_ROWS,
    DynamicTree,
    SizedTree,
    SparseTree,
    dynamic_tree,
    size_curve,
)
from apar_core.reporting import Cell, ReportTable
from apar_core.step_costs.costs import StepBatch, StepCosts
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import DTYPE_BYTES, ModelSize, find_model, model_of_config
from apar_core.step_costs.predict import WEIGHTS_BANDWIDTH_SHARE, step_costs

NUM_PROMPTS = 3
"""Prompt tokens of the paper's models, M."""

PAPER_MEDUSA_HEADS = 4
"""Heads that give table 1's 8.07% and 5.52%, one residual layer with bias each, relative to the
parameters of model and heads together."""

# ---- sizes -------------------------------------------------------------------------------------

# Source: config.json of mtgv/MobileLLaMA-1.4B-Chat.
_MOBILE_LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "vocab_size": 32_000, "dtype": "float16",
}  # fmt: skip

PAPER_SHARES: Mapping[str, tuple[ModelSize, float, float | None]] = {
    "MobileLLaMA": (
        model_of_config("MobileLLaMA-1.4B", _MOBILE_LLAMA, None, "its config.json"),
        4.50e-4,
        None,
    ),
    "Vicuna-7B": (find_model("llama-7b"), 1.82e-4, 8.07),
    "Vicuna-13B": (find_model("llama-13b"), 7.87e-5, 5.52),
}
"""Table 1: trained parameters of prompt tokens and of Medusa heads, in percent of the model's."""


def prompt_parameters(model: ModelSize, num_prompts: int = NUM_PROMPTS) -> int:
    """Return the trained parameters of prompt tokens: one embedding for each."""
    return num_prompts * model.hidden_size


def medusa_parameters(
    model: ModelSize, num_heads: int, num_layers: int = 1, *, bias: bool = True
) -> int:
    """Return the parameters of Medusa heads: residual layers and a vocabulary matrix for each."""
    size = model.hidden_size
    return num_heads * (num_layers * (size * size + bias * size) + size * model.vocab_size)


def prompt_share(model: ModelSize, num_prompts: int = NUM_PROMPTS) -> float:
    """Return the trained parameters of prompt tokens as a share of the model's."""
    return prompt_parameters(model, num_prompts) / model.parameters


def heads_share(model: ModelSize, heads: int) -> float:
    """Return so many parameters of Medusa heads as a share of the model's with its heads."""
    return heads / (model.parameters + heads)


def _tiny_medusa() -> int:
    """Return the parameters of apar-tiny's Medusa heads."""
    return medusa_parameters(find_model("apar-tiny"), 2, 2, bias=False)


def trained_parameters_table() -> ReportTable:
    """Return the share of trained parameters next to the paper's table 1."""
    parts: list[tuple[str, ModelSize, float | None, int | None, float | None]] = []
    for name, (model, prompts, medusa) in PAPER_SHARES.items():
        heads = None if medusa is None else medusa_parameters(model, PAPER_MEDUSA_HEADS)
        parts.append((name, model, prompts, heads, medusa))
    parts.append(("apar-tiny", find_model("apar-tiny"), None, _tiny_medusa(), None))
    return ReportTable(
        "trained-parameters",
        "Trained parameters (table 1), in percent",
        columns(
            "Model | Parameters, M = 3 :,.0f | M = 3 :.3g | Paper :.3g | M = 2 :.3g | "
            "Medusa heads :.3g | Paper's Medusa :.3g"
        ),
        tuple(
            (name, float(prompt_parameters(model)), 100 * prompt_share(model), paper,
             100 * prompt_share(model, 2), heads and 100 * heads_share(model, heads), medusa)
            for name, model, paper, heads, medusa in parts
        ),
        "Counted. The paper's 13B value is that of two prompt tokens. Its Medusa values are those "
        "of four heads with one layer, relative to model and heads together. apar-tiny has two "
        "heads with two layers.",
    )  # fmt: skip


def memory_table() -> ReportTable:
    """Return the memory of prompt tokens, Medusa heads and the guesses' KV cache (figure 7)."""
    parts: list[tuple[str, int, ModelSize, int]] = []
    for name in ("llama-7b", "llama-13b"):
        model = find_model(name)
        heads = medusa_parameters(model, PAPER_MEDUSA_HEADS) * DTYPE_BYTES[model.dtype]
        for dtype in ("float16", "float32"):
            prompts = prompt_parameters(model) * DTYPE_BYTES[dtype]
            parts.append((f"{name}, prompt tokens in {dtype}", prompts, model, heads))
        parts.append((f"{name}, 4 Medusa heads", heads, model, heads))
        for shape, num_guesses in (("1 + 34 + 71", 105), ("1 + 63", 63)):
            cache = num_guesses * model.kv_bytes_per_token
            parts.append((f"{name}, KV cache of {shape} inputs", cache, model, heads))
    tiny, heads = find_model("apar-tiny"), _tiny_medusa() * 2
    parts.append(("apar-tiny, prompt tokens in float32", 4 * prompt_parameters(tiny), tiny, heads))
    parts.append(("apar-tiny, 2 Medusa heads", heads, tiny, heads))
    return ReportTable(
        "memory",
        "Memory beside the model (figure 7)",
        columns("What | Bytes :,.0f | % of the weights :.3g | % of Medusa heads :.3g"),
        tuple(
            (what, float(size), 100 * size / model.weight_bytes, 100 * size / heads)
            for what, size, model, heads in parts
        ),
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


PUBLISHED_TABLE_1: Sequence[tuple[Cell, ...]] = tuple(
    (model, method, "paper, A100-40GB", throughput, length, 1e3 * pass_s, *rest)
    for model, method, throughput, length, pass_s, *rest in (
        ("MobileLLaMA", "plain", 50.2, 1.00, 0.020, None, None, "1"),
        ("MobileLLaMA", "ppd", 108.7, 2.43, 0.022, "Same", "10, 84, 89", "40, 285, 285"),
        ("Vicuna-7B", "plain", 39.2, 1.00, 0.026, "5.99", None, "1"),
        ("Vicuna-7B", "medusa", 82.0, 2.51, 0.0307, "5.98", "63", "63"),
        ("Vicuna-7B", "ppd", 88.0, 2.54, 0.029, "5.93", "10, 33, 34", "40, 105, 105"),
        ("Vicuna-13B", "plain", 30.4, 1.00, 0.0330, "6.38", None, "1"),
        ("Vicuna-13B", "medusa", 63.4, 2.59, 0.0408, None, "63", "63"),
        ("Vicuna-13B", "ppd", 66.1, 2.44, 0.0379, "6.32", "10, 20, 20", "40, 60, 60"),
    )
)
"""Table 1 as published: model, method, where, tokens per second, tokens per step, milliseconds of a
pass, score, candidates and inputs. The paper measured with transformers."""


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
        tree = paper_tree(model)
        candidates = tuple(each.num_candidates for each in tree.trees)
        free = dynamic_tree(tree.table, candidates, tuple(each.num_prompts for each in tree.trees))
        inputs = [each.num_inputs() - 1 for each in tree.trees[1:]]
        rows.append(
            (model, ", ".join(map(str, candidates[1:])), ", ".join(map(str, inputs)),
             tree.expected_length(), free.expected_length(), reported)
        )  # fmt: skip
    return ReportTable(
        "paper-trees",
        "The paper's tree sizes (table 1)",
        columns(
            "Model | Candidates of states 1 to 3 | Inputs | Tokens per step, published limits :.3f "
            "| any node may have prompts :.3f | Paper, MT-Bench :.2f"
        ),
        tuple(rows),
        "Predicted from the authors' acceptance on Alpaca. The paper's values are of sampled "
        "answers, with typical acceptance. Inputs leave out the last token, as there.",
    )


# ---- speculation on a GPU ----------------------------------------------------------------------

CHAIN_THRESHOLD = 1.15
"""Speed-up at batch 1 from which on a chain in vLLM would be worth implementing."""

MAX_INPUTS = 128
"""Inputs of the largest tree that is tried for a row."""


@dataclass(frozen=True, slots=True)
class Prediction:
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

    @property
    def spare_s(self) -> float:
        """How much longer a pass may be until the speed-up falls to the threshold of a chain."""
        return self.expected_length * self.plain_s / CHAIN_THRESHOLD - self.pass_s


def predict(
    costs: StepCosts,
    rows: int,
    context: int,
    num_inputs: int,
    length: float,
    *,
    extra_s: float = 0.0,
    overlapped: bool = True,
) -> Prediction:
    """Predict passes that yield `length` tokens of a row and take `extra_s` beside the model.

    With async scheduling (`overlapped`) the GPU does not wait for the host; without speculation it
    never does.
    """

    def step_s(inputs: int, *, overlapped: bool) -> float:
        batch = StepBatch(rows, rows * context, prefill_tokens=rows * (inputs - 1))
        return costs.step_s(batch, overlapped=overlapped)

    pass_s = step_s(num_inputs, overlapped=overlapped) + extra_s
    return Prediction(rows, num_inputs, length, pass_s, step_s(1, overlapped=True))


def predict_tree(costs: StepCosts, tree: DynamicTree, rows: int, context: int) -> Prediction:
    """Predict decoding with a fixed tree."""
    return predict(costs, rows, context, tree.num_inputs(), tree.expected_length())


def predict_sizes(
    costs: StepCosts, acceptance: AcceptanceTable, rows: int, context: int
) -> list[Prediction]:
    """Predict decoding with the best tree of each size, smallest first."""
    return [
        predict(costs, rows, context, sized.num_inputs, sized.expected_length)
        for sized in _sizes(acceptance)
    ]


@lru_cache(maxsize=64)
def _sizes(acceptance: AcceptanceTable) -> tuple[SizedTree, ...]:
    """Return the best tree of each size; they do not depend on the duration of a pass."""
    return size_curve(acceptance, lambda _tokens: 1.0, max_inputs=MAX_INPUTS)


def predict_best(
    costs: StepCosts, acceptance: AcceptanceTable, rows: int, context: int
) -> Prediction:
    """Predict decoding with the tree that is best for so many rows; with 1 input, no guesses."""
    return max(predict_sizes(costs, acceptance, rows, context), key=lambda each: each.speedup)


# ---- a chain in vLLM ---------------------------------------------------------------------------

CHAIN_HOST_S = (0.58e-3, 0.70e-3)
"""Host time of a step with a chain of 3 that a GPU would wait for: engine core and V1 model runner.

Measured at one row on this project's CPU while it was busy: first decile and median of all steps
(docs/experiments/2026-11-23-prompt-chain.md). The host of a GPU may be faster.
"""


def chain_tree(acceptance: AcceptanceTable, num_drafts: int) -> DynamicTree:
    """Return chains instead of trees: what `apar_core/engine/prompt_chain.py` drafts in vLLM.

    A chain of `num_drafts` has the likeliest candidates, as many as there are but for one, and
    prompt tokens in the remaining places. Prompt tokens only help if the whole chain is accepted:
    in a causal sequence they cannot stand after a node before others.
    """
    most = acceptance.num_distances
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
    return DynamicTree(tuple(trees), acceptance)


def predict_chain(
    costs: StepCosts,
    acceptance: AcceptanceTable,
    num_drafts: int,
    rows: int,
    context: int,
    *,
    host_s: float | None = None,
) -> Prediction:
    """Predict a chain in vLLM against plain decoding with async scheduling.

    vLLM 0.32 runs a custom proposer without async scheduling, because it takes sampled tokens on
    the CPU. So each step also takes the host's time: `host_s`, by default the engine core's.
    """
    tree = chain_tree(acceptance, num_drafts)
    return predict(
        costs,
        rows,
        context,
        tree.num_inputs(),
        tree.expected_length(),
        extra_s=host_s or 0.0,
        overlapped=host_s is not None,
    )


def medusa_chain_length(acceptance: AcceptanceTable) -> float:
    """Return the expected tokens of a step when a top-1 chain is guessed after every token.

    So works vLLM's medusa method: heads read the hidden state of the last accepted token, whichever
    it is.
    """
    length = accepted = 1.0
    for row in acceptance.probabilities:
        accepted *= row[0]
        length += accepted
    return length


def chain_table(context: int) -> ReportTable:
    """Return the prediction of a chain in vLLM for Llama-7B and -13B."""
    numbers = (1, 8, 32)
    rows: list[tuple[Cell, ...]] = []
    for name, acceptance in PAPER_TABLES.items():
        for gpu in ("a100-80gb", "h100", "h200"):
            costs = step_costs(paper_model(name), find_gpu(gpu))
            for drafts in (2, 3, 4):
                found = [predict_chain(costs, acceptance, drafts, n, context) for n in numbers]
                first = found[0]
                rows.append(
                    (f"{name}, {gpu}", float(drafts), float(first.num_inputs),
                     first.expected_length, 1e3 * first.plain_s, 1e3 * first.pass_s,
                     *(each.speedup for each in found), 1e3 * first.spare_s)
                )  # fmt: skip
    seven = medusa_chain_length(VICUNA_7B)
    return ReportTable(
        "chain-in-vllm",
        "A chain of prompt tokens in vLLM, predicted",
        columns(
            "Model and GPU | Drafts :.0f | Inputs :.0f | Tokens per step :.3f | "
            "Plain step (ms) :.2f | Chain step (ms) :.2f | "
            + " | ".join(f"Speed-up at {number} rows :.2f" for number in numbers)
            + " | Spare (ms) :.2f"
        ),
        tuple(rows),
        f"Context {context} tokens. Spare: a longer step at 1 row brings the speed-up below "
        f"{CHAIN_THRESHOLD}. Guesses after every accepted token, as of Medusa heads with the same "
        f"acceptance, would yield {seven:.2f} tokens per step with Vicuna-7B's table.",
    )


# ---- live rows on a GPU ------------------------------------------------------------------------


def medusa_heads_s(model: ModelSize, gpu_name: str) -> float:
    """Return the seconds in which a GPU reads the paper's Medusa heads once, in 16 bits."""
    num_bytes = 2 * medusa_parameters(model, PAPER_MEDUSA_HEADS)
    return num_bytes / (find_gpu(gpu_name).bandwidth * WEIGHTS_BANDWIDTH_SHARE)


def predict_gpu(
    name: str, gpu: str, context: int
) -> list[tuple[Prediction, Prediction, Prediction]]:
    """Predict the best trees, the paper's tree and Medusa on a GPU, by number of live rows.

    `name` is "Vicuna-7B" or "Vicuna-13B". Medusa's acceptance by rank is not published for these
    models: it has the tree and the tokens per step of table 1, whatever the rows.
    """
    model = paper_model(name)
    costs = step_costs(model, find_gpu(gpu))
    tree, heads_s = paper_tree(name), medusa_heads_s(model, gpu)
    return [
        (
            predict_best(costs, PAPER_TABLES[name], rows, context),
            predict_tree(costs, tree, rows, context),
            predict(costs, rows, context, _MEDUSA_INPUTS, MEDUSA_LENGTH[name], extra_s=heads_s),
        )
        for rows in FAMILY_ROWS
    ]


def live_rows_table(context: int) -> ReportTable:
    """Return speed-ups of speculation at 1 to 16 live rows, on all GPUs that hold the model."""
    rows = [
        (f"{name}, {gpu}", float(best.rows), 1e3 * best.plain_s,
         float(best.num_inputs), best.expected_length, 1e3 * best.pass_s, best.speedup,
         paper.expected_length, 1e3 * paper.pass_s, paper.speedup,
         1e3 * medusa.pass_s, medusa.speedup)
        for name in PAPER_TABLES
        for gpu in ("a100-40gb", "rtx-4090", "a100-80gb", "h100", "h200")
        if paper_model(name).weight_bytes < find_gpu(gpu).memory_bytes
        for best, paper, medusa in predict_gpu(name, gpu, context)
    ]  # fmt: skip
    return ReportTable(
        "gpu-live-rows",
        "Speculation by live rows on a GPU, predicted",
        columns(
            "Model and GPU | Rows :.0f | Plain pass (ms) :.2f | Best inputs per row :.0f | "
            "Tokens per pass :.2f | Pass (ms) :.2f | Speed-up :.2f | Paper's tree: tokens :.2f | "
            "pass (ms) :.2f | speed-up :.2f | Medusa: pass (ms) :.2f | Medusa: speed-up :.2f"
        ),
        tuple(rows),
        f"Rows are threads of one answer or requests in a batch, {context} tokens of context each. "
        "Speed-ups are relative to the same rows without speculation. Medusa has table 1's tree of "
        "63 and its tokens per step. Tree attention is taken to be as fast as causal attention.",
    )


def answer_speedups(
    costs: StepCosts,
    acceptance: AcceptanceTable,
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
    steps: Counter[int] = Counter()
    for answer in live_rows:
        steps.update(answer)
    best = {rows: predict_best(costs, acceptance, rows, context) for rows in {1, *steps}}

    def seconds_of(predictions: Mapping[int, Prediction]) -> float:
        return sum(
            number * predictions[rows].pass_s / predictions[rows].expected_length
            for rows, number in steps.items()
        )

    plain_s = sequential_steps * best[1].plain_s
    seconds = {
        "plain": plain_s,
        "vanilla_apar": sum(number * best[rows].plain_s for rows, number in steps.items()),
        "ppd": sequential_steps * best[1].pass_s / best[1].expected_length,
        "ppd_apar": seconds_of(best),
    }
    if medusa_length is not None:
        seconds["medusa_apar"] = seconds_of(
            {
                rows: predict(costs, rows, context, _MEDUSA_INPUTS, medusa_length, extra_s=heads_s)
                for rows in steps
            }
        )
    return {name: plain_s / each for name, each in seconds.items()}


def prediction_tables(context: int) -> list[ReportTable]:
    """Return all tables that need neither weights nor answers."""
    return [
        trained_parameters_table(),
        memory_table(),
        paper_trees_table(),
        chain_table(context),
        live_rows_table(context),
    ]
