"""Parallel Prompt Decoding measured: decoders and trees in turn, trained variants.

All methods answer the same prompts greedily, one after the other for each prompt. Every second
prompt reverses their order, so that a disturbance of the machine favours none.
Source: Parallel Prompt Decoding (arXiv 2405.18628), sections 4 and 5, appendix B.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from apar_core.json_lines import append_line, read_finished_lines
from apar_core.offline.decoders.draft_model import DraftDecoder
from apar_core.offline.decoders.interface import (
    AnswerDecoder,
    DecodedAnswer,
    DecodeLimits,
    decode_answer,
)
from apar_core.offline.decoders.load import ThreadDecoder, load_decoder
from apar_core.offline.decoders.pass_times import PassTimes, ProposerName
from apar_core.offline.evaluation.own_answers import measured_table, own_answers
from apar_core.offline.evaluation.prompt_sets import Question
from apar_core.offline.evaluation.replay_text import ModelText
from apar_core.offline.speculation.acceptance import ACCEPTANCE_FILE, AcceptanceTable, read_table
from apar_core.offline.speculation.frozen_training import train_tiny_beside
from apar_core.offline.speculation.prompt_tokens import load_prompt_tokens
from apar_core.offline.speculation.sparse_tree import (
    DynamicTree,
    TreeFamily,
    random_tree,
    size_curve,
    static_tree,
)
from apar_core.offline.speculation.train_prompts import PROMPT_TOKENS
from apar_core.offline.training.packing import PackedTree
from apar_core.offline.training.recipe import PromptRecipe
from apar_core.offline.training.tree_forward import SDPA

PLAIN, PPD, VANILLA, PPD_APAR, MEDUSA = "plain", "ppd", "vanilla_apar", "ppd_apar", "medusa_apar"
DRAFT = "draft"
MAIN_METHODS = (PLAIN, PPD, VANILLA, PPD_APAR, MEDUSA)


class PpdSettings(BaseModel):
    """Settings of `apar evaluate ppd`.

    `model` is a folder or hub name. `draft_model` guesses for it, also with prompt tokens of its
    own, `draft_prompts`. `train_steps` trains variants of the embedded model's prompt tokens, 0
    none. `tree_sizes` are inputs of a row in a pass for the comparison of trees.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    model_name: str
    prompt_tokens: Path
    medusa_heads: Path
    draft_model: Path | None = None
    draft_prompts: Path | None = None
    prompts: str = "held-out"
    questions: Path | None = None
    limit: PositiveInt | None = None
    max_tokens: PositiveInt = 512
    device: str = "auto"
    dtype: str = "auto"
    tree_sizes: tuple[PositiveInt, ...] = (8, 16, 32)
    context: PositiveInt = 512
    train_steps: NonNegativeInt = 0
    seed: NonNegativeInt = 0


# ---- answers -----------------------------------------------------------------------------------


class LivePasses(BaseModel):
    """Passes of an answer with the same number of live threads, without the prefill."""

    model_config = ConfigDict(frozen=True)

    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: LivePasses) -> LivePasses:
        """Return both together."""
        return LivePasses(
            passes=self.passes + other.passes,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
        )


class MethodAnswer(BaseModel):
    """Answer of one method: passes by live threads, and passes of a draft model if there is one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question_id: str
    method: str
    text_tokens: int
    ended: bool
    text: str
    prefill_s: float
    live: dict[int, LivePasses]
    draft_passes: int = 0

    @property
    def total(self) -> LivePasses:
        """All passes but the prefill."""
        return sum(self.live.values(), LivePasses())

    @property
    def thread_passes(self) -> int:
        """Passes, each counted once for every live thread."""
        return sum(rows * part.passes for rows, part in self.live.items())


def method_answer(question_id: str, method: str, answer: DecodedAnswer, text: str) -> MethodAnswer:
    """Return the measurement of an answer from its trace."""
    live: dict[int, LivePasses] = {}
    for record in answer.trace[1:]:
        part = LivePasses(passes=1, tokens=record.tokens, seconds=record.seconds)
        live[record.threads] = live.get(record.threads, LivePasses()) + part
    return MethodAnswer(
        question_id=question_id,
        method=method,
        text_tokens=len(answer.text_ids),
        ended=all(thread.ended for thread in answer.threads),
        text=text,
        prefill_s=answer.trace[0].seconds,
        live=live,
    )


@dataclass(frozen=True)
class Method:
    """Decoder under a name, with its trees.

    `tree` is that of one live row, None without speculation; `ensemble` is 0 for Medusa heads.
    """

    name: str
    decoder: AnswerDecoder
    tree: DynamicTree | None = None
    ensemble: int = 1
    sized: str = ""

    @property
    def num_inputs(self) -> int:
        """Largest number of inputs of a row in a pass."""
        return 1 if self.tree is None else self.tree.num_inputs(self.ensemble)

    @property
    def expected_length(self) -> float:
        """Predicted tokens of a thread in a pass."""
        return 1.0 if self.tree is None else self.tree.expected_length()


def sized_tree(table: AcceptanceTable, inputs: int, ensemble: int) -> DynamicTree:
    """Return the dynamic tree with the most tokens per step among those of a size."""
    return size_curve(table, lambda _tokens: 1.0, ensemble=ensemble, max_inputs=inputs)[-1].tree


def compared_trees(
    table: AcceptanceTable, inputs: int, ensemble: int, seed: int
) -> dict[str, DynamicTree]:
    """Return a dynamic, a static and a random tree of at most so many inputs (figure 8a).

    The random tree has as many candidates and prompt tokens as the dynamic tree of state M.
    """
    dynamic = sized_tree(table, inputs, ensemble)
    # Every node of a static tree has M prompt tokens.
    num_nodes = max(inputs // (1 + ensemble * table.num_distances), 1)
    last = dynamic.trees[-1]
    return {
        "dynamic": dynamic,
        "static": static_tree(table, num_nodes - 1),
        "random": random_tree(table, last.num_candidates, last.num_prompts, seed),
    }


def build_methods(
    settings: PpdSettings,
    model: Any,
    text: ModelText,
    prompts: AcceptanceTable,
    medusa: AcceptanceTable,
    times: Mapping[ProposerName, PassTimes],
    ensemble: int,
) -> list[Method]:
    """Return the decoders: without speculation, with trees by hardware, and of fixed sizes."""

    def load(name: str, tree: TreeFamily | None = None) -> ThreadDecoder:
        return load_decoder(
            name,
            model,
            text.tokenizer,
            prompt_tokens=settings.prompt_tokens if name in (PPD, PPD_APAR) else None,
            medusa_heads=settings.medusa_heads if name == MEDUSA else None,
            trees=tree,
            device=str(model.device),
            dtype=model.dtype,
        )

    family = times["prompt_tokens"].family(prompts, ensemble=ensemble)
    heads_family = times["medusa_heads"].family(medusa, ensemble=0)
    first, heads_first = family.for_rows(1), heads_family.for_rows(1)
    plain = load(PLAIN)
    methods = [
        Method(PLAIN, plain),
        Method(PPD, load(PPD, family), first, ensemble, "hardware"),
        Method(VANILLA, load(VANILLA)),
        Method(PPD_APAR, load(PPD_APAR, family), first, ensemble, "hardware"),
        Method(MEDUSA, load(MEDUSA, heads_family), heads_first, 0, "hardware"),
    ]
    for size in settings.tree_sizes:
        trees = compared_trees(prompts, size, ensemble, settings.seed)
        for kind, tree in trees.items():
            name = f"{PPD}, {kind}, {size}"
            methods.append(Method(name, load(PPD, TreeFamily.of(tree)), tree, ensemble, kind))
        dynamic = trees["dynamic"]
        methods.append(
            Method(
                f"{PPD_APAR}, {size}", load(PPD_APAR, TreeFamily.of(dynamic)), dynamic, ensemble,
                "dynamic",
            )
        )  # fmt: skip
        heads = sized_tree(medusa, size, 0)
        methods.append(
            Method(f"{MEDUSA}, {size}", load(MEDUSA, TreeFamily.of(heads)), heads, 0, "dynamic")
        )
    return [*methods, *draft_methods(settings, plain, text)]


def draft_methods(settings: PpdSettings, target: ThreadDecoder, text: ModelText) -> list[Method]:
    """Return the target with guesses of the draft model, without and with its prompt tokens.

    The draft's prompt tokens have the tree of the middle one of the compared sizes: a pass of a
    small model takes little longer with more inputs.
    """
    if settings.draft_model is None:
        return []
    model = target.decoding.model
    methods = []
    for name, prompts in ((PLAIN, None), (PPD, settings.draft_prompts)):
        if name == PPD and prompts is None:
            continue
        trees = None
        if prompts is not None:
            ensemble = load_prompt_tokens(prompts).settings.ensemble
            size = sorted(settings.tree_sizes)[len(settings.tree_sizes) // 2]
            trees = TreeFamily.of(sized_tree(read_table(prompts), size, ensemble))
        draft = load_decoder(
            name,
            settings.draft_model,
            text.tokenizer,
            prompt_tokens=prompts,
            trees=trees,
            device=str(model.device),
            dtype=model.dtype,
        )
        methods.append(Method(f"{DRAFT}, {name}", DraftDecoder(target, draft)))
    return methods


class MethodStore:
    """Measured answers of all methods, in memory and in a JSON lines file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers = {
            (line.question_id, line.method): line
            for line in read_finished_lines(path, MethodAnswer)
        }

    def has(self, question_id: str, method: str) -> bool:
        """Return whether the answer is stored."""
        return (question_id, method) in self._answers

    def add(self, answer: MethodAnswer) -> None:
        """Store an answer."""
        append_line(self._path, answer)
        self._answers[answer.question_id, answer.method] = answer

    def of_method(self, method: str) -> list[MethodAnswer]:
        """Return a method's answers."""
        return [answer for (_, name), answer in self._answers.items() if name == method]


def measure_methods(
    methods: Sequence[Method],
    questions: Sequence[Question],
    text: ModelText,
    limits: DecodeLimits,
    store: MethodStore,
    show: Callable[[], None],
) -> None:
    """Let all methods answer the first turn of each question, in turn."""
    warmed = False
    for number, question in enumerate(questions):
        if question.raw_prompt:
            prompt_ids = text.encode_prompt(question.turns[0])
        else:
            prompt_ids = text.encode_chat(question.messages(0, ()))
        in_turn = methods if number % 2 == 0 else methods[::-1]
        wanted = [each for each in in_turn if not store.has(question.question_id, each.name)]
        if wanted and not warmed:
            for each in methods:
                decode_answer(each.decoder, prompt_ids, limits=DecodeLimits(max_tokens=8))
            warmed = True
        for each in wanted:
            before = _draft_passes(each.decoder)
            answer = decode_answer(each.decoder, prompt_ids, limits=limits)
            measured = method_answer(
                question.question_id, each.name, answer, text.decode(answer.text_ids)
            )
            num_draft = _draft_passes(each.decoder) - before
            store.add(measured.model_copy(update={"draft_passes": num_draft}))
        show()


def _draft_passes(decoder: AnswerDecoder) -> int:
    return decoder.draft_passes if isinstance(decoder, DraftDecoder) else 0


def length_interval(
    answers: Sequence[MethodAnswer], seed: int = 0, draws: int = 1000
) -> tuple[float, float, float]:
    """Return the tokens of a thread in a pass over all answers, with a 95% bootstrap interval."""

    def ratio(chosen: Sequence[MethodAnswer]) -> float:
        passes = sum(answer.thread_passes for answer in chosen)
        return sum(answer.total.tokens for answer in chosen) / max(passes, 1)

    generator = random.Random(seed)
    drawn = sorted(ratio(generator.choices(answers, k=len(answers))) for _ in range(draws))
    return ratio(answers), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)]


# ---- trained variants --------------------------------------------------------------------------

_VARIANT_PROMPTS = 30


@dataclass(frozen=True, slots=True)
class Variant:
    """Variant of the recipe `apar-tiny-prompts`: where the paper has it, and what differs.

    `steps_share` and `batch_share` are relative to the other variants. `paper` has the paper's
    accuracies @1 top-1, @1 top-5, @2 top-1 and @2 top-5 (Vicuna-7B on Alpaca), None where it has
    none.
    """

    place: str
    change: Mapping[str, Any]
    paper: tuple[float, float, float, float] | None = None
    steps_share: float = 1.0
    batch_share: float = 1.0


_TWO = {"ensemble": 2}
VARIANTS: Mapping[str, Variant] = {
    "1 EPT": Variant("tables 2, 3, 8", {}, (0.485, 0.779, 0.261, 0.586)),
    "2 EPTs": Variant("tables 2, 6, 7", _TWO, (0.506, 0.794, 0.276, 0.602)),
    "4 EPTs": Variant("table 2", {"ensemble": 4}),
    "1 EPT, no distillation": Variant("table 3", {"loss": "labels"}, (0.472, 0.771, 0.248, 0.576)),
    "1 EPT, a sixth of the steps": Variant(
        "table 3", {}, (0.474, 0.773, 0.247, 0.574), steps_share=1 / 6
    ),
    "1 EPT, batch of 1": Variant("table 3", {}, (0.484, 0.775, 0.259, 0.581), batch_share=1 / 4),
    "1 EPT, reverse KL": Variant("equation 1", {"loss": "reverse_kl"}),
    "2 EPTs, decoder mask": Variant(
        "table 6", {**_TWO, "mask": "decoder"}, (0.465, 0.755, 0.262, 0.572)
    ),
    "2 EPTs, encoder mask": Variant(
        "table 6", {**_TWO, "mask": "encoder"}, (0.473, 0.765, 0.256, 0.573)
    ),
    "2 EPTs, learned weights": Variant(
        "table 7", {**_TWO, "average": "learned"}, (0.503, 0.779, 0.250, 0.576)
    ),
    "2 EPTs, probabilities averaged": Variant("section 3.2", {**_TWO, "average": "probabilities"}),
    "1 EPT, 2 exits": Variant("table 8", {"exits": 2}, (0.420, 0.723, 0.213, 0.518)),
    "1 EPT, 3 exits": Variant("table 8", {"exits": 3}, (0.422, 0.723, 0.214, 0.517)),
}
"""Variants by name. The paper has 100 EPTs where these have 2, 12 epochs for all steps, and 2 for a
sixth. Tables 4 and 5, a prefix and a decoding head of their own, train more than embeddings."""


def variant_recipe(variant: Variant, num_steps: int) -> PromptRecipe:
    """Return the recipe of a variant if the others train `num_steps`."""
    recipe = PROMPT_TOKENS.tiny_recipe().recipe
    batch = max(round(recipe.batch_size * variant.batch_share), 1)
    changes = {
        "ensemble": 1,
        **variant.change,
        "num_steps": max(round(num_steps * variant.steps_share), 1),
        "batch_size": batch,
        "micro_batch_size": min(recipe.micro_batch_size, batch),
    }
    return PromptRecipe.model_validate({**recipe.model_dump(), **changes})


def train_variants(
    checkpoint: Path, folder: Path, num_steps: int, show: Callable[[], None]
) -> dict[str, AcceptanceTable]:
    """Train the variants of the embedded model's prompt tokens; return their acceptance tables.

    Each table is stored beside its weights, and a stored variant is not trained again. `show` is
    called after each variant.
    """
    measured_on: list[PackedTree] = []

    def measure(
        model: Any, tokenizer: Any, prompts: Any, chosen: Sequence[Sequence[int]], out: Path
    ) -> AcceptanceTable:
        if not measured_on:
            measured_on.extend(own_answers(model, tokenizer, chosen))
        model.set_attn_implementation(SDPA)
        table = measured_table(model, tokenizer, prompts, measured_on, len(chosen))
        table.write(out)
        return table

    tables = {}
    for name, variant in VARIANTS.items():
        out = folder / re.sub(r"[^a-z0-9]+", "-", name.lower())
        if not (out / ACCEPTANCE_FILE).is_file():
            settings = PROMPT_TOKENS.tiny_recipe().model_copy(
                update={
                    "recipe": variant_recipe(variant, num_steps),
                    "num_held_out": _VARIANT_PROMPTS,
                }
            )
            train_tiny_beside(PROMPT_TOKENS, checkpoint, out, settings, measure=measure)
        tables[name] = read_table(out)
        show()
    return tables
