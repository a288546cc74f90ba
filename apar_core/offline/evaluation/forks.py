"""Evaluation of a model that forks: where, how well, and how fast compared with one thread.

An engine answers the questions, with forks and, for the base model, without. The same texts are
then replayed in the engine under load: with their forks, and as one thread. The command line hands
the engines in, because nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from transformers import AutoConfig

from apar_core.errors import EvaluationError
from apar_core.fork_parameters import NO_TOKEN
from apar_core.formats.control_tokens import TreeTokens
from apar_core.formats.resolved_format import find_format
from apar_core.json_lines import read_lines
from apar_core.offline.data.records import ExampleRecord, count_forks
from apar_core.offline.data.structure import StructureRules, extract_tree
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.evaluation.answer_files import read_answer_set
from apar_core.offline.evaluation.fork_answers import ForkAnswer, GeneratedAnswer, Source
from apar_core.offline.evaluation.fork_forcing import ForcedCounts, ForkForcing
from apar_core.offline.evaluation.prompt_sets import (
    BENCHMARKS,
    HELD_OUT,
    Question,
    held_out_questions,
    load_prompts,
)
from apar_core.offline.evaluation.replay_text import ModelText, load_text
from apar_core.offline.evaluation.speed_run import choose_device, choose_dtype
from apar_core.offline.training.chat_format import turn_end_id
from apar_core.offline.training.example_encoder import PlainEncoder, encoder_for
from apar_core.offline.training.pretrained import (
    load_model,
    load_tokenizer,
    pad_token_id,
    tree_tokens,
)
from apar_core.offline.training.tree_forward import SDPA, limited_attention
from apar_core.reporting import LineStore, ShowProgress

Item = TypeVar("Item")

MODEL: Source = "model"
BASE: Source = "base"

Method = Literal["forked", "sequential", "base"]
FORKED: Method = "forked"
SEQUENTIAL: Method = "sequential"
BASE_ANSWERS: Method = "base"

_ANSWERS_AT_ONCE = 32
_TEXTS_AT_ONCE = 8
_MIN_ANSWERS_OF_RUN = 8
_LONGEST_FORCED = 4096
# Of a configuration, what the time of a step depends on.
_SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


class ForkEvaluationSettings(BaseModel):
    """Settings of an evaluation of forks.

    `model` and `base` are folders or hub names, and `..._name` their names in reports. `requests`
    are numbers of concurrent requests. Forks are compared with those of `rules`. The seed is that
    of sampling and of the bootstrap.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    model_name: str
    base: str | None = None
    base_name: str | None = None
    prompts: str = "vicuna-bench"
    questions: Path | None = None
    limit: PositiveInt | None = None
    max_tokens: PositiveInt = 1024
    temperature: NonNegativeFloat = 0.0
    rules: StructureRules = StructureRules()
    seed: NonNegativeInt = 0
    requests: tuple[PositiveInt, ...] = (1, 8, 32)
    repeats: PositiveInt = 5

    def as_facts(self) -> dict[str, str]:
        """Return the settings that must not change when a run is resumed."""
        own = {"model", "base", "questions", "requests", "repeats"}
        facts = self.model_dump(mode="json", exclude=own)
        return {name: str(value) for name, value in facts.items()}

    @property
    def is_greedy(self) -> bool:
        """Whether answers do not depend on chance."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """An answer whose tokens an engine is made to generate.

    threads: what each thread generates, by its replay key. flat: the same text and its end token,
    which one thread generates if `forked` is not set.
    """

    answer_id: str
    category: str
    prompt_ids: Sequence[int]
    threads: Mapping[str, list[int]]
    flat: list[int]
    forked: bool

    @property
    def text_tokens(self) -> int:
        """Tokens of the text."""
        return len(self.flat) - 1

    @property
    def max_tokens(self) -> int:
        """Limit on tokens with which the answer is complete."""
        return len(self.flat) + 1

    def scripts(self, *, forked: bool) -> Mapping[str, list[int]]:
        """Return the tokens to replay, by replay key."""
        return self.threads if forked else {"": self.flat}


class RunFigures(BaseModel):
    """Figures of one run in an engine.

    tokens_per_s: text tokens of all requests, while as many were running as was asked for.
    latency_s: mean time of an answer. peak_kv_tokens: the most tokens that held KV blocks had room
    for. attended_tokens: mean per answer, by the paper's schedule; None for a model without forks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: int
    text_tokens: int
    duration_s: float
    tokens_per_s: float
    latency_s: float
    steps: int
    peak_kv_tokens: int
    attended_tokens: float | None


class ForkEngine(Protocol):
    """An engine in this process that forks, and that can be made to generate given tokens."""

    @property
    def context_tokens(self) -> int:
        """The longest sequence, prompt included."""

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        *,
        forks: bool,
    ) -> list[GeneratedAnswer]:
        """Answer prompts of token ids; each may fork or none.

        `sampling` are arguments of vLLM's `SamplingParams`.
        """

    def log_losses(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[float]:
        """Return the log-loss (nats) of each text after its prompt, summed over its tokens."""

    def run(
        self, answers: Sequence[ReplayedAnswer], *, requests: int, num_answers: int
    ) -> RunFigures:
        """Replay answers in a closed loop of so many requests; measure `num_answers` of them."""

    def shutdown(self) -> None:
        """Free the engine's memory."""


OpenEngine = Callable[[str], ForkEngine]
"""Starts the engine of a model, given as in the settings."""


class TextLoss(BaseModel):
    """Log-loss (nats) of one answer under the base model, and its number of tokens there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Source
    question_id: str
    loss: float
    tokens: int

    @property
    def key(self) -> tuple[Source, str]:
        """Unique key within a run."""
        return self.source, self.question_id


class RecordedLoss(BaseModel):
    """Log-loss (nats) of the text of a recorded answer, as one model reads it.

    The model reads it with the forks of the rules, the base model in one thread unless it forks.
    tokens: of the text; 0 for an answer that is too long.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Source
    example: str
    kind: str
    forks: int
    nats: float
    tokens: int

    @property
    def key(self) -> tuple[Source, str]:
        """Unique key within a run."""
        return self.source, self.example


class RunKey(BaseModel):
    """Identifies a speed run; rounds count from 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: int
    method: Method
    round: int


class SpeedRun(BaseModel):
    """A speed run and what it measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: RunKey
    figures: RunFigures


@dataclass(frozen=True, slots=True)
class ForkResults:
    """All that was measured.

    base, losses and recorded are empty without a base model. recorded: the losses of the model and
    of its base for each recorded answer that both can read. `missing` says why a part was not
    measured, by the name of the part. waits: whether threads of the format wait for their children.
    """

    settings: ForkEvaluationSettings
    format_name: str
    waits: bool
    answers: list[ForkAnswer]
    base: list[ForkAnswer]
    losses: dict[tuple[Source, str], TextLoss]
    forced: list[ForcedCounts]
    recorded: list[tuple[RecordedLoss, RecordedLoss]]
    runs: list[SpeedRun]
    missing: dict[str, str] = field(default_factory=dict)


class _Engines:
    """The engine of one model at a time, since each wants most of the memory."""

    def __init__(self, open_engine: OpenEngine) -> None:
        self._open = open_engine
        self._name: str | None = None
        self._engine: ForkEngine | None = None

    def of(self, name: str) -> ForkEngine:
        """Return the engine of a model; close another one's."""
        if self._engine is None or self._name != name:
            self.close()
            self._engine, self._name = self._open(name), name
        return self._engine

    def close(self) -> None:
        """Close the engine, if any."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None


def run_forks(
    settings: ForkEvaluationSettings, folder: Path, open_engine: OpenEngine, progress: ShowProgress
) -> ForkResults:
    """Measure what the folder does not contain yet; return all results.

    Raises EvaluationError for invalid settings or files, and for a model without control tokens.
    """
    text = load_text(settings.model)
    found = find_format(text.tokenizer.get_vocab())
    if found is None:
        raise EvaluationError(
            f"{settings.model_name} has no control tokens, so it cannot fork: make a model that "
            f"forks of it with `apar convert {settings.model_name} --out DIR`, and evaluate that "
            f"one with --base {settings.model_name}"
        )
    models = {MODEL: _Model(settings.model, settings.model_name, text)}
    if settings.base is not None:
        name = settings.base_name or settings.base
        models[BASE] = _Model(settings.base, name, load_text(settings.base))
    questions = load_prompts(settings.prompts, settings.questions)[: settings.limit]
    if len({question.question_id for question in questions}) < len(questions):
        raise EvaluationError(f"{settings.prompts}: two questions have the same id")
    engines = _Engines(open_engine)
    evaluation = _Evaluation(settings, folder, models, engines, progress)
    waits = found.definition.waits
    base: list[ForkAnswer] = []
    try:
        answers = evaluation.answer(MODEL, questions)
        if BASE in models:
            base = evaluation.answer(BASE, questions)
            evaluation.measure_losses(answers, base)
        runs = evaluation.measure_speed(answers, base)
    finally:
        engines.close()
    missing = evaluation.missing
    forced: list[ForcedCounts] = []
    recorded: list[tuple[RecordedLoss, RecordedLoss]] = []
    if waits:
        reason = f"threads of the format {found.definition.name} wait for their children"
        missing["Places of forks"] = f"not counted: {reason}"
    else:
        forced, recorded = evaluation.read_recorded()
    if BASE not in models:
        missing["Base model"] = "none given (--base): not compared with its answers"
    losses = dict(evaluation.losses.lines)
    return ForkResults(
        settings,
        found.definition.name,
        waits,
        answers,
        base,
        losses,
        forced,
        recorded,
        runs,
        missing,
    )


def recorded_examples(settings: ForkEvaluationSettings) -> list[ExampleRecord]:
    """Return the recorded answers of the prompts, as trees; none if they have no answers.

    apar-tiny's held-out prompts and files with a `response` have answers, as `held_out.jsonl` of
    `apar data prepare`.
    """
    if settings.prompts == HELD_OUT:
        number = len(held_out_questions())
        examples = list(Corpus(0, held_out=True, stream="").examples(number))
        return examples[: settings.limit]
    if settings.prompts in BENCHMARKS:
        return []
    path = Path(settings.prompts)
    if next(read_lines(path, _AnswerOfLine)).response is None:
        return []
    examples = []
    for answer in read_answer_set(path, settings.questions).answers[: settings.limit]:
        kind, tree, _ = extract_tree(answer.text, settings.rules)
        examples.append(ExampleRecord(kind, answer.messages, tree))
    return examples


class _AnswerOfLine(BaseModel):
    response: str | None = None


class _Model(NamedTuple):
    """Checkpoint, name in reports, and tokenizer of a source of answers."""

    path: str
    name: str
    text: ModelText


class _Evaluation:
    """One evaluation with the stores of its folder; `missing` says what was not measured."""

    def __init__(
        self,
        settings: ForkEvaluationSettings,
        folder: Path,
        models: Mapping[Source, _Model],
        engines: _Engines,
        progress: ShowProgress,
    ) -> None:
        facts = settings.as_facts()
        self.answers = LineStore(folder / "answers.jsonl", facts, ForkAnswer, lambda line: line.key)
        self.losses = LineStore(folder / "losses.jsonl", facts, TextLoss, lambda line: line.key)
        self.runs = LineStore(folder / "runs.jsonl", facts, SpeedRun, lambda line: line.key)
        self.forced = LineStore(
            folder / "forced.jsonl", facts, ForcedCounts, lambda line: line.example
        )
        self.recorded = LineStore(
            folder / "recorded.jsonl", facts, RecordedLoss, lambda line: line.key
        )
        self.missing: dict[str, str] = {}
        self._settings = settings
        self._models = models
        self._engines = engines
        self._progress = progress

    def answer(self, source: Source, questions: Sequence[Question]) -> list[ForkAnswer]:
        """Return the answers of a model to the first turns of questions."""
        settings, lines = self._settings, self.answers.lines
        model = self._models[source]
        missing = [each for each in questions if (source, each.question_id) not in lines]
        # Each question has a seed of its own, also in a run that continues.
        seeds = {each.question_id: settings.seed + n for n, each in enumerate(questions)}
        if missing:
            done = self._progress.start(f"answers of {model.name}", len(missing))
            engine = self._engines.of(model.path)
        for some in _batches(missing, _ANSWERS_AT_ONCE):
            prompts = [model.text.encode_question(question) for question in some]
            for question, prompt in zip(some, prompts, strict=True):
                if len(prompt) >= engine.context_tokens:
                    raise EvaluationError(
                        f"question {question.question_id} has {len(prompt)} tokens, the context of "
                        f"{model.name} {engine.context_tokens}: leave it out of {settings.prompts}"
                    )
            limits = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
            sampling = [{**limits, "seed": seeds[question.question_id]} for question in some]
            found = engine.answer(prompts, sampling, forks=source == MODEL)
            for question, prompt, answer in zip(some, prompts, found, strict=True):
                ids = (question.question_id, question.category)
                self.answers.add(ForkAnswer.of(answer, source, ids, prompt))
                done()
        return [lines[source, each.question_id] for each in questions]

    def measure_losses(self, answers: Sequence[ForkAnswer], base: Sequence[ForkAnswer]) -> None:
        """Measure forked answers, and the base model's to the same questions, under that model."""
        model = self._models[BASE]
        pairs = zip(answers, base, strict=True)
        wanted = [each for pair in pairs if pair[0].forked for each in pair]
        missing = [each for each in wanted if each.key not in self.losses.lines]
        if not missing:
            return
        done = self._progress.start(f"log-loss under {model.name}", len(missing))
        engine = self._engines.of(model.path)
        # Both texts are read after the prompt that the base model reads.
        prompts = {each.question_id: each.prompt_ids for each in base}
        for some in _batches(missing, _TEXTS_AT_ONCE):
            before = [prompts[each.question_id] for each in some]
            texts = [
                model.text.encode(each.text)[: engine.context_tokens - len(prompt) - 1]
                for each, prompt in zip(some, before, strict=True)
            ]
            losses = engine.log_losses(before, texts)
            for (source, question_id), ids, loss in zip(
                (each.key for each in some), texts, losses, strict=True
            ):
                self.losses.add(
                    TextLoss(source=source, question_id=question_id, loss=loss, tokens=len(ids))
                )
                done()

    def measure_speed(
        self, answers: Sequence[ForkAnswer], base: Sequence[ForkAnswer]
    ) -> list[SpeedRun]:
        """Replay forked answers in three ways, round by round, so that all see the same machine."""
        settings = self._settings
        largest = max(_MIN_ANSWERS_OF_RUN, *settings.requests)
        # What a limit has cut off has no end that could be replayed.
        whole = [each for each in answers if each.forked and not each.is_cut][:largest]
        if not whole:
            self.missing["Speed"] = "not measured: no answer forks and ends by itself"
            return []
        end_id = turn_end_id(self._models[MODEL].text.tokenizer)

        def replayed(some: Sequence[ForkAnswer], *, forked: bool = False) -> list[ReplayedAnswer]:
            return [
                ReplayedAnswer(
                    each.question_id,
                    each.category,
                    each.prompt_ids,
                    each.threads,
                    [*each.token_ids, end_id],
                    forked,
                )
                for each in some
            ]

        replays = {FORKED: replayed(whole, forked=True), SEQUENTIAL: replayed(whole)}
        reason = self._base_differs()
        if reason is not None:
            self.missing["Speed of the base model's answers"] = f"not measured: {reason}"
        elif base:
            chosen = {each.question_id for each in whole}
            own = [each for each in base if each.question_id in chosen and each.token_ids]
            replays[BASE_ANSWERS] = replayed(own)
        # In an order in which a slow minute of the machine hits all methods alike.
        keys = [
            RunKey(requests=requests, method=method, round=number)
            for number in range(settings.repeats)
            for requests in settings.requests
            for method in (replays if number % 2 == 0 else reversed(replays))
        ]
        wanted = [key for key in keys if key not in self.runs.lines]
        if wanted:
            done = self._progress.start("speed runs", len(wanted))
            engine = self._engines.of(settings.model)
            for warming in replays.values():
                engine.run(warming, requests=2, num_answers=1)
            for key in wanted:
                number = max(_MIN_ANSWERS_OF_RUN, key.requests)
                figures = engine.run(replays[key.method], requests=key.requests, num_answers=number)
                self.runs.add(SpeedRun(key=key, figures=figures))
                done()
        return [self.runs.lines[key] for key in keys]

    def read_recorded(
        self,
    ) -> tuple[list[ForcedCounts], list[tuple[RecordedLoss, RecordedLoss]]]:
        """Read the recorded answers of the prompts.

        Returns counts of the model's first choices, and log-losses under it and its base.
        """
        settings = self._settings
        examples = recorded_examples(settings)
        part = "Recorded answers"
        if not examples:
            reason = f"{settings.prompts} has none: no forks were compared with them"
            self.missing[part] = reason
            return [], []
        by_name = {f"{number}": example for number, example in enumerate(examples)}
        longest: dict[Source, int] = {}
        for source, model in self._models.items():
            config = AutoConfig.from_pretrained(model.path)
            text_config = config.get_text_config()
            positions = getattr(text_config, "max_position_embeddings", _LONGEST_FORCED)
            longest[source] = min(positions, _LONGEST_FORCED)
            if (limit := limited_attention(config, longest[source])) is not None:
                self.missing[part] = f"not read: {model.name} has {limit}"
                return [], []
        forced, recorded = self.forced.lines, self.recorded.lines
        compared = BASE in self._models
        for source, model in self._models.items():
            counted = forced if source == MODEL else by_name
            missing = {
                name: example
                for name, example in by_name.items()
                if name not in counted or (compared and (source, name) not in recorded)
            }
            if not missing:
                continue
            done = self._progress.start(f"recorded answers, read by {model.name}", len(missing))
            forcing = _forcing(model.path, longest[source])
            for name, example in missing.items():
                read = forcing.read(example)
                if name not in counted:
                    counts = ForcedCounts(example=name, kind=example.kind, answers=0)
                    if read is not None:
                        counts = read.counts(name, example.kind)
                    self.forced.add(counts)
                if compared:
                    nats, tokens = (0.0, 0) if read is None or not read.is_whole else read.loss()
                    self.recorded.add(
                        RecordedLoss(
                            source=source,
                            example=name,
                            kind=example.kind,
                            forks=count_forks(example.answer),
                            nats=nats,
                            tokens=tokens,
                        )
                    )
                done()
        pairs = []
        if compared:
            pairs = [(recorded[MODEL, name], recorded[BASE, name]) for name in by_name]
        return (
            [forced[name] for name in by_name if forced[name].answers],
            [pair for pair in pairs if all(each.tokens for each in pair)],
        )

    def _base_differs(self) -> str | None:
        """Say why answers of the base model cannot be replayed in the model's engine, or None."""
        if BASE not in self._models:
            return None
        model, base = self._models[MODEL], self._models[BASE]
        vocabulary = model.text.tokenizer.get_vocab()
        if not base.text.tokenizer.get_vocab().items() <= vocabulary.items():
            return "its tokens are not those of the model"
        configs = [
            AutoConfig.from_pretrained(each.path).get_text_config() for each in (model, base)
        ]
        same = all(len({getattr(each, n, None) for each in configs}) == 1 for n in _SHAPE)
        return None if same else "the two models differ in size"


def _forcing(path: str, longest: int) -> ForkForcing:
    """Load a model to read recorded answers of up to `longest` tokens."""
    device = choose_device("auto")
    model = load_model(path, choose_dtype("auto", device), torch.device(device)).eval()
    # FlexAttention is for training.
    model.set_attn_implementation(SDPA)
    tokenizer = load_tokenizer(path)
    encoder = encoder_for(tokenizer, longest)
    tokens = TreeTokens(NO_TOKEN, NO_TOKEN, turn_end_id(tokenizer))
    if not isinstance(encoder, PlainEncoder):
        tokens = tree_tokens(tokenizer)
    return ForkForcing(model, encoder, tokens, pad_token_id(tokenizer))


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))
