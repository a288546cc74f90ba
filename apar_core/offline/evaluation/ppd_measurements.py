"""Parallel Prompt Decoding measured: decoders and trees in turn, trained variants.

All methods answer the same prompts greedily, one after the other for each prompt. Every second
prompt reverses their order, so that a disturbance of the machine favours none.
Source: Parallel Prompt Decoding (arXiv 2405.18628), sections 4 and 5, appendix B.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from apar_core.errors import EvaluationError
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.decoders.draft_model import DraftDecoder
from apar_core.offline.decoders.interface import (
    AnswerDecoder,
    DecodedAnswer,
    DecodedThread,
    DecodeLimits,
    TokenChoice,
    decode_answer,
)
from apar_core.offline.decoders.load import (
    DECODER_NAMES,
    HEADED,
    SINGLE_THREAD,
    UNSPECULATED,
    DecoderName,
    ThreadDecoder,
    load_decoder,
)
from apar_core.offline.decoders.pass_times import PassTimes, ProposerName
from apar_core.offline.decoders.token_chooser import EXACT
from apar_core.offline.decoders.weightless import LOOKUP_TABLE, RECYCLING_TABLE
from apar_core.offline.evaluation.acceptance_report import Guesses, read_guesses
from apar_core.offline.evaluation.own_answers import measure_and_write
from apar_core.offline.evaluation.prompt_sets import Question
from apar_core.offline.evaluation.replay_text import ModelText
from apar_core.offline.speculation.acceptance import ACCEPTANCE_FILE, AcceptanceTable, read_table
from apar_core.offline.speculation.frozen_training import train_beside, train_tiny_beside
from apar_core.offline.speculation.sparse_tree import (
    DynamicTree,
    TreeFamily,
    dynamic_tree_of_size,
    optimal_tree,
    random_tree,
    static_tree,
)
from apar_core.offline.speculation.train_prompts import PROMPT_TOKENS
from apar_core.offline.training.recipe import PromptRecipe, load_recipe
from apar_core.offline.training.tree_trainer import OnStep
from apar_core.reporting import LineStore
from apar_core.whole_files import replace_file

PLAIN, PPD, MEDUSA = "plain", "ppd", "medusa"
VANILLA, PPD_APAR, MEDUSA_APAR = "vanilla_apar", "ppd_apar", "medusa_apar"
WEIGHTLESS = {"lookup": LOOKUP_TABLE, "recycling": RECYCLING_TABLE}
"""Decoders that guess without weights, and the acceptance that their trees are sized for."""
DRAFT = "draft"


class PpdSettings(BaseModel):
    """Settings of `apar evaluate ppd`.

    `model` is a folder or hub name. `draft_model` guesses for it, also with prompt tokens of its
    own, `draft_prompts`. `tree_sizes` are inputs of a row in a pass for the comparison of trees.
    `decoders` are compared with `plain` and `vanilla_apar`: those that the model and the weights
    allow. Each answer is measured `repeats` times. Above a `temperature` of 0, `acceptance` is
    typical or exact, where each text is a sample of plain decoding with the same seed.

    `train_steps` trains variants of the prompt tokens, 0 none, with `seeds` seeds each and `many`
    EPTs in place of the paper's 100: of apar-tiny on its corpus, of another model on `data` with
    changes of `recipe`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    model_name: str
    prompt_tokens: Path
    medusa_heads: Path | None = None
    draft_model: Path | None = None
    draft_prompts: Path | None = None
    prompts: str = "held-out"
    questions: Path | None = None
    limit: PositiveInt | None = None
    max_tokens: PositiveInt = 512
    device: str = "auto"
    dtype: str = "auto"
    decoders: tuple[DecoderName, ...] = DECODER_NAMES
    tree_sizes: tuple[PositiveInt, ...] = (8, 16, 32)
    context: PositiveInt = 512
    temperature: NonNegativeFloat = 0.0
    acceptance: Literal["typical", "exact"] = "typical"
    repeats: PositiveInt = 1
    train_steps: NonNegativeInt = 0
    data: Path | None = None
    recipe: str = "ppd-small"
    many: Annotated[int, Field(ge=2)] = 10
    seeds: PositiveInt = 1
    seed: NonNegativeInt = 0

    @property
    def middle_size(self) -> int:
        """The middle one of the compared tree sizes."""
        return sorted(self.tree_sizes)[len(self.tree_sizes) // 2]


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
    """Answer of one method: passes by live threads, and passes of a draft model if there is one.

    `text` is for readers; methods are compared by their `threads`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    question_id: str
    method: str
    text_tokens: int
    text: str
    threads: tuple[DecodedThread, ...]
    prefill_s: float
    live: dict[int, LivePasses]
    draft_passes: int = 0
    repeat: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """Unique key within a run."""
        return self.question_id, self.method, self.repeat

    @property
    def ended(self) -> bool:
        """Whether no limit cut a thread off."""
        return all(thread.ended for thread in self.threads)

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
        text=text,
        threads=answer.threads,
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
    def base(self) -> str:
        """Name of the decoder, without that of its tree."""
        return self.name.partition(",")[0]

    @property
    def num_inputs(self) -> int:
        """Largest number of inputs of a row in a pass."""
        return 1 if self.tree is None else self.tree.num_inputs(self.ensemble)

    @property
    def expected_length(self) -> float:
        """Predicted tokens of a thread in a pass."""
        return 1.0 if self.tree is None else self.tree.expected_length()


def compared_trees(
    table: AcceptanceTable, inputs: int, ensemble: int, seed: int
) -> dict[str, DynamicTree]:
    """Return trees of at most so many inputs (figure 8a): optimal, dynamic, static and random.

    `dynamic` is the paper's construction, and the random tree has its numbers of candidates and
    prompt tokens.
    """
    dynamic = dynamic_tree_of_size(table, inputs, ensemble)
    # Every node of a static tree has M prompt tokens.
    num_nodes = max(inputs // (1 + ensemble * table.num_distances), 1)
    return {
        "optimal": optimal_tree(table, inputs, ensemble),
        "dynamic": dynamic,
        "static": static_tree(table, num_nodes - 1),
        "random": random_tree(table, *dynamic.division, seed),
    }


def check_decoders(settings: PpdSettings, vocabulary: Mapping[str, int]) -> None:
    """Raise EvaluationError for a chosen decoder that the model or the weights do not allow.

    By default, all that they allow are compared.
    """
    if settings.decoders == DECODER_NAMES:
        return
    forks = find_control_tokens(vocabulary) is not None
    for name in settings.decoders:
        if not forks and name not in SINGLE_THREAD:
            raise EvaluationError(f"--decoders {name} needs a model with control tokens")
        if settings.medusa_heads is None and name in HEADED:
            raise EvaluationError(f"--decoders {name} needs --medusa-heads")


def build_methods(
    settings: PpdSettings,
    model: Any,
    text: ModelText,
    prompts: Guesses,
    medusa: Guesses | None,
    times: Mapping[ProposerName, PassTimes],
) -> list[Method]:
    """Return the decoders: without speculation, with trees by hardware, and of fixed sizes.

    Prompt lookup and Token Recycling have trees for an assumed acceptance. Without control tokens
    there are no decoders with forks, without heads none with heads.
    """

    def load(name: str, tree: TreeFamily | None = None) -> ThreadDecoder:
        return load_decoder(
            name,
            model,
            text.tokenizer,
            prompt_tokens=settings.prompt_tokens,
            medusa_heads=settings.medusa_heads,
            trees=tree,
            device=str(model.device),
            dtype=model.dtype,
            acceptance=EXACT if settings.acceptance == "exact" else None,
        )

    forks = find_control_tokens(text.tokenizer.get_vocab()) is not None
    plain = load(PLAIN)
    methods = [Method(PLAIN, plain)]

    def add(name: str, guesses: Guesses) -> None:
        """Add a decoder whose trees are sized by hardware."""
        family = times[guesses.proposer].family(guesses.table, ensemble=guesses.ensemble)
        tree = family.for_rows(1)
        methods.append(Method(name, load(name, family), tree, guesses.ensemble, "hardware"))

    add(PPD, prompts)
    if forks:
        methods.append(Method(VANILLA, load(VANILLA)))
        add(PPD_APAR, prompts)
    others = {kind: Guesses("prompt_tokens", table, 0) for kind, table in WEIGHTLESS.items()}
    if medusa is not None:
        others = {MEDUSA: medusa, **others}
    for kind, guesses in others.items():
        add(kind, guesses)
        if forks:
            add(f"{kind}_apar", guesses)
    for size in settings.tree_sizes:
        trees = compared_trees(prompts.table, size, prompts.ensemble, settings.seed)
        for kind, tree in trees.items():
            decoder = load(PPD, TreeFamily.of(tree))
            methods.append(Method(f"{PPD}, {kind}, {size}", decoder, tree, prompts.ensemble, kind))
        if forks:
            best = trees["optimal"]
            decoder = load(PPD_APAR, TreeFamily.of(best))
            name = f"{PPD_APAR}, {size}"
            methods.append(Method(name, decoder, best, prompts.ensemble, "optimal"))
        if medusa is not None:
            heads = optimal_tree(medusa.table, size, 0)
            name = MEDUSA_APAR if forks else MEDUSA
            decoder = load(name, TreeFamily.of(heads))
            methods.append(Method(f"{name}, {size}", decoder, heads, 0, "optimal"))
    chosen = {*UNSPECULATED, *settings.decoders}
    methods = [method for method in methods if method.base in chosen]
    return [*methods, *draft_methods(settings, plain, text)]


def draft_methods(settings: PpdSettings, target: ThreadDecoder, text: ModelText) -> list[Method]:
    """Return the target with guesses of the draft model, without and with its prompt tokens.

    The draft's prompt tokens have the tree of the middle one of the compared sizes: a pass of a
    small model takes little longer with more inputs.
    """
    checkpoint = settings.draft_model
    if checkpoint is None:
        return []
    model = target.decoding.model

    def guided(name: str, **guesses: Any) -> Method:
        draft = load_decoder(
            name,
            checkpoint,
            text.tokenizer,
            device=str(model.device),
            dtype=model.dtype,
            **guesses,
        )
        return Method(f"{DRAFT}, {name}", DraftDecoder(target, draft))

    methods = [guided(PLAIN)]
    if settings.draft_prompts is not None:
        (prompts,) = read_guesses(settings.draft_prompts, None)
        tree = optimal_tree(prompts.table, settings.middle_size, prompts.ensemble)
        trees = TreeFamily.of(tree)
        methods.append(guided(PPD, prompt_tokens=settings.draft_prompts, trees=trees))
    return methods


def measure_methods(
    settings: PpdSettings,
    methods: Sequence[Method],
    questions: Sequence[Question],
    text: ModelText,
    store: LineStore[tuple[str, str, int], MethodAnswer],
    show: Callable[[], None],
) -> None:
    """Let all methods answer the first turn of each question, in turn, and all of it again."""
    limits = DecodeLimits(max_tokens=settings.max_tokens)
    choice = TokenChoice.sampled(settings.temperature, seed=settings.seed)
    warmed, last_repeat = False, -1
    asked = [(repeat, question) for repeat in range(settings.repeats) for question in questions]
    for number, (repeat, question) in enumerate(asked):
        prompt_ids, name = text.encode_question(question), question.question_id
        in_turn = methods if number % 2 == 0 else methods[::-1]
        wanted = [each for each in in_turn if (name, each.name, repeat) not in store.lines]
        if wanted and not warmed:
            for each in methods:
                decode_answer(each.decoder, prompt_ids, limits=DecodeLimits(max_tokens=8))
            warmed = True
        if repeat != last_repeat:
            # What Token Recycling has learned from these questions would make the repeat faster.
            last_repeat = repeat
            for each in methods:
                if isinstance(each.decoder, ThreadDecoder):
                    each.decoder.forget()
        for each in wanted:
            before = _draft_passes(each.decoder)
            answer = decode_answer(each.decoder, prompt_ids, choice, limits)
            measured = method_answer(name, each.name, answer, text.decode(answer.text_ids))
            num_draft = _draft_passes(each.decoder) - before
            store.add(measured.model_copy(update={"draft_passes": num_draft, "repeat": repeat}))
        show()


def _draft_passes(decoder: AnswerDecoder) -> int:
    return decoder.draft_passes if isinstance(decoder, DraftDecoder) else 0


def length_interval(
    answers: Sequence[MethodAnswer], seed: int = 0, draws: int = 1000
) -> tuple[float, float, float]:
    """Return the tokens of a thread in a pass over all answers, with a 95% bootstrap interval.

    Repeats have the same passes, so the first one counts.
    """
    answers = [answer for answer in answers if answer.repeat == 0]

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
    """Variant of a recipe for prompt tokens: the paper's tables that have it, and what differs.

    `paper` has the paper's accuracies @1 top-1, @1 top-5, @2 top-1 and @2 top-5, None where it has
    none. They are of Vicuna-7B and the first 20 tokens of answers to Alpaca's questions.
    `steps_share` is relative to the paper's 12 epochs of batches of 4.
    """

    place: str
    change: Mapping[str, Any]
    paper: tuple[float, float, float, float] | None = None
    steps_share: float = 1.0


def variants(many: int) -> dict[str, Variant]:
    """Return the variants by name; `many` EPTs stand for the paper's 100.

    Tables 2, 6 and 7 are of training without distillation, as their values in table 3 show.
    """
    labels, several = {"loss": "labels"}, {"ensemble": many}
    half, sixth, twelfth = 1 / 2, 1 / 6, 1 / 12
    # As many epochs as with batches of 4.
    one = {"batch_size": 1, "micro_batch_size": 1}
    without = {
        number: Variant("table 2", {**labels, "ensemble": number}, _PAPER_EPTS[number])
        for number in (2, 5, 10)
        if number < many
    }
    name = f"{many} EPTs"
    return {
        "1 EPT, labels": Variant("tables 2, 3", labels, _PAPER_EPTS[1]),
        **{f"{number} EPTs, labels": variant for number, variant in without.items()},
        f"{name}, labels": Variant(
            "tables 2, 3, 6, 7", {**labels, **several}, (0.506, 0.794, 0.276, 0.602)
        ),
        "1 EPT, 1/6 of the steps": Variant(
            "table 3", {}, (0.474, 0.773, 0.247, 0.574), steps_share=sixth
        ),
        "1 EPT, 1/2 of the steps": Variant(
            "table 3", {}, (0.480, 0.773, 0.250, 0.580), steps_share=half
        ),
        "1 EPT": Variant("tables 3, 4, 5, 8", {}, (0.485, 0.779, 0.261, 0.586)),
        "1 EPT, batch of 1": Variant("table 3", one, (0.484, 0.775, 0.259, 0.581), steps_share=4),
        f"{name}, 1/12 of the steps": Variant(
            "table 3", several, (0.504, 0.793, 0.273, 0.598), steps_share=twelfth
        ),
        f"{name}, 1/2 of the steps": Variant(
            "table 3", several, (0.520, 0.802, 0.302, 0.620), steps_share=half
        ),
        name: Variant("table 3", several, (0.525, 0.805, 0.308, 0.625)),
        f"{name}, batch of 1": Variant(
            "table 3", {**several, **one}, (0.530, 0.809, 0.309, 0.626), steps_share=4
        ),
        "1 EPT, prefix": Variant("table 4", {"prefix": True}, (0.412, 0.738, 0.204, 0.541)),
        "1 EPT, head in one stage": Variant(
            "table 5", {"head": "one stage"}, (0.385, 0.614, 0.229, 0.482)
        ),
        "1 EPT, head in two stages": Variant(
            "table 5", {"head": "two stages"}, (0.506, 0.795, 0.276, 0.602)
        ),
        f"{name}, labels, decoder mask": Variant(
            "table 6", {**labels, **several, "mask": "decoder"}, (0.465, 0.755, 0.262, 0.572)
        ),
        f"{name}, labels, encoder mask": Variant(
            "table 6", {**labels, **several, "mask": "encoder"}, (0.473, 0.765, 0.256, 0.573)
        ),
        f"{name}, labels, learned weights": Variant(
            "table 7", {**labels, **several, "average": "learned"}, (0.503, 0.779, 0.250, 0.576)
        ),
        "1 EPT, 2 exits": Variant("table 8", {"exits": 2}, (0.420, 0.723, 0.213, 0.518)),
        "1 EPT, 3 exits": Variant("table 8", {"exits": 3}, (0.422, 0.723, 0.214, 0.517)),
        "1 EPT, reverse KL": Variant("equation 1", {"loss": "reverse_kl"}),
        f"{name}, probabilities averaged": Variant(
            "section 3.2", {**several, "average": "probabilities"}
        ),
    }


# Table 2, by the number of EPTs.
_PAPER_EPTS = {
    1: (0.472, 0.771, 0.248, 0.576),
    2: (0.486, 0.777, 0.259, 0.583),
    5: (0.499, 0.787, 0.265, 0.596),
    10: (0.494, 0.786, 0.273, 0.600),
}

LOSSES_FILE = "losses.json"
VARIANT_FILES = ("config.json", "model.safetensors", ACCEPTANCE_FILE)
"""What is kept of a variant's training, beside the losses."""


def variant_recipe(
    variant: Variant, base: PromptRecipe, num_steps: int, seed: int = 0
) -> PromptRecipe:
    """Return the recipe of a variant if the others train `num_steps`; it differs from `base`."""
    changes = {
        "ensemble": 1,
        **variant.change,
        "num_steps": max(round(num_steps * variant.steps_share), 1),
        "seed": seed,
        "log_every_steps": 1,
    }
    return PromptRecipe.model_validate({**base.model_dump(), **changes})


@dataclass(frozen=True, slots=True)
class TrainedVariant:
    """Acceptance table and loss of each step of a variant that was trained with one seed."""

    table: AcceptanceTable
    losses: tuple[float, ...]


def train_variants(
    settings: PpdSettings, model_name: str, folder: Path, show: Callable[[], None]
) -> dict[str, list[TrainedVariant]]:
    """Train each variant with `settings.seeds` seeds; return what came out, by name.

    Models other than apar-tiny train on `settings.data`. Each table and its losses are stored
    beside the weights, and a stored variant is not trained again. `show` is called after each.
    """
    # Variants with the same seed are measured on the same answers.
    measure = partial(measure_and_write, known={})

    def train(recipe: PromptRecipe, out: Path, on_step: OnStep) -> None:
        if settings.data is not None:
            with TemporaryDirectory() as run:
                train_beside(
                    PROMPT_TOKENS, model_name, settings.data, Path(run), recipe, measure=measure,
                    on_step=on_step,
                )  # fmt: skip
                for name in VARIANT_FILES:
                    shutil.copy(Path(run) / name, out)
            return
        tiny = PROMPT_TOKENS.tiny_recipe().model_copy(
            update={"recipe": recipe, "num_held_out": _VARIANT_PROMPTS}
        )
        train_tiny_beside(
            PROMPT_TOKENS, checkpoint_path(), out, tiny, measure=measure, on_step=on_step
        )

    base = PROMPT_TOKENS.tiny_recipe().recipe
    if settings.data is not None:
        base = load_recipe(settings.recipe, PromptRecipe)
        if not base.validation_share:
            raise EvaluationError(
                f"--recipe {settings.recipe} has validation_share 0: variants are measured on "
                "validation prompts"
            )
    found: dict[str, list[TrainedVariant]] = {}
    for name, variant in variants(settings.many).items():
        for seed in range(settings.seeds):
            out = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{seed}"
            if not (out / LOSSES_FILE).is_file():
                out.mkdir(parents=True, exist_ok=True)
                losses: list[float] = []
                recipe = variant_recipe(variant, base, settings.train_steps, seed)
                train(recipe, out, lambda step, losses=losses: losses.append(step.loss))  # type: ignore[misc]
                replace_file(out / LOSSES_FILE, json.dumps(losses) + "\n")
            stored = json.loads((out / LOSSES_FILE).read_text(encoding="utf-8"))
            found.setdefault(name, []).append(TrainedVariant(read_table(out), tuple(stored)))
            show()
    return found
