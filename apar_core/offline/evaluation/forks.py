"""Evaluation of a model that forks: where, how well, and how fast compared with one thread.

An engine answers the questions, with forks and, for the base model, without. The same texts are
then replayed in the engine under load: with their forks, and as one thread. The command line hands
the engines in, because nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from transformers import AutoConfig

from apar_core.errors import EvaluationError
from apar_core.formats.resolved_format import find_format
from apar_core.json_lines import read_lines
from apar_core.offline.data.records import ExampleRecord
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
from apar_core.offline.training.example_encoder import ExampleEncoder
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

    base and losses are empty without a base model. `missing` says why a part was not measured, by
    the name of the part. waits: whether threads of the format wait for their children.
    """

    settings: ForkEvaluationSettings
    format_name: str
    waits: bool
    answers: list[ForkAnswer]
    base: list[ForkAnswer]
    losses: dict[tuple[Source, str], TextLoss]
    forced: list[ForcedCounts]
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
    base_text = None if settings.base is None else load_text(settings.base)
    questions = _questions(settings)
    engines = _Engines(open_engine)
    evaluation = _Evaluation(settings, folder, engines, progress, text, base_text)
    waits = found.definition.parent == "waits"
    missing: dict[str, str] = {}
    try:
        answers = evaluation.answer(MODEL, text, questions)
        base: list[ForkAnswer] = []
        if base_text is not None:
            base = evaluation.answer(BASE, base_text, questions)
            evaluation.measure_losses(answers, base)
        runs = evaluation.measure_speed(answers, base, missing)
    finally:
        engines.close()
    if waits:
        reason = f"threads of the format {found.definition.name} wait for their children"
        missing["Places of forks"] = f"not counted: {reason}"
        forced = []
    else:
        forced = evaluation.force(missing)
    if base_text is None:
        missing["Base model"] = "none given (--base): not compared with its answers"
    return ForkResults(
        settings,
        found.definition.name,
        waits,
        answers,
        base,
        dict(evaluation.losses.lines),
        forced,
        runs,
        missing,
    )


def _questions(settings: ForkEvaluationSettings) -> list[Question]:
    questions = load_prompts(settings.prompts, settings.questions)[: settings.limit]
    ids = [question.question_id for question in questions]
    if len(set(ids)) < len(ids):
        raise EvaluationError(f"{settings.prompts}: two questions have the same id")
    return questions


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


class _Evaluation:
    """One evaluation with the stores of its folder."""

    def __init__(
        self,
        settings: ForkEvaluationSettings,
        folder: Path,
        engines: _Engines,
        progress: ShowProgress,
        text: ModelText,
        base_text: ModelText | None,
    ) -> None:
        facts = settings.as_facts()
        self.answers = LineStore(folder / "answers.jsonl", facts, ForkAnswer, lambda line: line.key)
        self.losses = LineStore(folder / "losses.jsonl", facts, TextLoss, lambda line: line.key)
        self.runs = LineStore(folder / "runs.jsonl", facts, SpeedRun, lambda line: line.key)
        self.forced = LineStore(
            folder / "forced.jsonl", facts, ForcedCounts, lambda line: line.example
        )
        self._settings = settings
        self._engines = engines
        self._progress = progress
        self._text = text
        self._base_text = base_text

    def answer(
        self, source: Source, text: ModelText, questions: Sequence[Question]
    ) -> list[ForkAnswer]:
        """Return the answers of a model to the first turns of questions."""
        settings, lines = self._settings, self.answers.lines
        model, name = _model_of(settings, source)
        missing = [each for each in questions if (source, each.question_id) not in lines]
        # Each question has a seed of its own, also in a run that continues.
        places = {each.question_id: place for place, each in enumerate(questions)}
        if missing:
            done = self._progress.start(f"answers of {name}", len(missing))
            engine = self._engines.of(model)
        for some in _batches(missing, _ANSWERS_AT_ONCE):
            prompts = [_prompt_ids(text, question) for question in some]
            for question, prompt in zip(some, prompts, strict=True):
                if len(prompt) >= engine.context_tokens:
                    raise EvaluationError(
                        f"question {question.question_id} has {len(prompt)} tokens, the context of "
                        f"{name} {engine.context_tokens}: leave it out of {settings.prompts}"
                    )
            sampling = [
                {
                    "max_tokens": settings.max_tokens,
                    "temperature": settings.temperature,
                    "seed": settings.seed + places[question.question_id],
                }
                for question in some
            ]
            found = engine.answer(prompts, sampling, forks=source == MODEL)
            for question, prompt, answer in zip(some, prompts, found, strict=True):
                ids = (question.question_id, question.category)
                self.answers.add(ForkAnswer.of(answer, source, ids, prompt))
                done()
        return [self.answers.lines[source, each.question_id] for each in questions]

    def measure_losses(self, answers: Sequence[ForkAnswer], base: Sequence[ForkAnswer]) -> None:
        """Measure forked answers, and the base model's to the same questions, under that model."""
        assert self._base_text is not None
        model, name = _model_of(self._settings, BASE)
        pairs = zip(answers, base, strict=True)
        wanted = [each for pair in pairs if pair[0].forked for each in pair]
        missing = [each for each in wanted if each.key not in self.losses.lines]
        if not missing:
            return
        done = self._progress.start(f"log-loss under {name}", len(missing))
        engine = self._engines.of(model)
        # Both texts are read after the prompt that the base model reads.
        prompts = {each.question_id: each.prompt_ids for each in base}
        for some in _batches(missing, _TEXTS_AT_ONCE):
            before = [prompts[each.question_id] for each in some]
            texts = [
                self._base_text.encode(each.text)[: engine.context_tokens - len(prompt) - 1]
                for each, prompt in zip(some, before, strict=True)
            ]
            losses = engine.log_losses(before, texts)
            for each, ids, loss in zip(some, texts, losses, strict=True):
                self.losses.add(
                    TextLoss(
                        source=each.source,
                        question_id=each.question_id,
                        loss=loss,
                        tokens=len(ids),
                    )
                )
                done()

    def measure_speed(
        self,
        answers: Sequence[ForkAnswer],
        base: Sequence[ForkAnswer],
        missing: dict[str, str],
    ) -> list[SpeedRun]:
        """Replay forked answers in three ways, round by round, so that all see the same machine."""
        settings = self._settings
        largest = max(_MIN_ANSWERS_OF_RUN, *settings.requests)
        # What a limit has cut off has no end that could be replayed.
        whole = [each for each in answers if each.forked and not each.is_cut][:largest]
        if not whole:
            missing["Speed"] = "not measured: no answer forks and ends by itself"
            return []
        end_id = turn_end_id(self._text.tokenizer)
        replays: dict[Method, list[ReplayedAnswer]] = {
            FORKED: [_replayed(each, end_id, forked=True) for each in whole],
            SEQUENTIAL: [_replayed(each, end_id, forked=False) for each in whole],
        }
        reason = self._base_differs()
        if base and reason is None:
            chosen = {each.question_id for each in whole}
            own = [each for each in base if each.question_id in chosen and each.token_ids]
            replays[BASE_ANSWERS] = [_replayed(each, end_id, forked=False) for each in own]
        elif reason is not None:
            missing["Speed of the base model's answers"] = f"not measured: {reason}"
        keys = _run_keys(settings, list(replays))
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

    def force(self, missing: dict[str, str]) -> list[ForcedCounts]:
        """Read the recorded answers of the prompts, and count the model's first choices."""
        settings = self._settings
        examples = recorded_examples(settings)
        part = "Recorded answers"
        if not examples:
            missing[part] = f"{settings.prompts} has none: no forks were compared with them"
            return []
        device = choose_device("auto")
        config = AutoConfig.from_pretrained(settings.model)
        positions = getattr(config.get_text_config(), "max_position_embeddings", _LONGEST_FORCED)
        longest = min(positions, _LONGEST_FORCED)
        if (limit := limited_attention(config, longest)) is not None:
            missing[part] = f"not read: {settings.model_name} has {limit}"
            return []
        names = [f"{number}" for number in range(len(examples))]
        if any(name not in self.forced.lines for name in names):
            done = self._progress.start("recorded answers", len(examples))
            model = load_model(
                settings.model, choose_dtype("auto", device), torch.device(device)
            ).eval()
            # FlexAttention is for training.
            model.set_attn_implementation(SDPA)
            tokenizer = load_tokenizer(settings.model)
            forcing = ForkForcing(
                model,
                ExampleEncoder(tokenizer, longest),
                tree_tokens(tokenizer),
                pad_token_id(tokenizer),
            )
            for name, example in zip(names, examples, strict=True):
                if name not in self.forced.lines:
                    counts = forcing.counts(name, example)
                    self.forced.add(
                        counts or ForcedCounts(example=name, kind=example.kind, answers=0)
                    )
                done()
        return [self.forced.lines[name] for name in names if self.forced.lines[name].answers]

    def _base_differs(self) -> str | None:
        """Say why answers of the base model cannot be replayed in the model's engine, or None."""
        settings, base_text = self._settings, self._base_text
        if settings.base is None or base_text is None:
            return None
        vocabulary = self._text.tokenizer.get_vocab()
        if not base_text.tokenizer.get_vocab().items() <= vocabulary.items():
            return "its tokens are not those of the model"
        shapes = [
            [getattr(config, name, None) for name in _SHAPE]
            for config in (
                AutoConfig.from_pretrained(each).get_text_config()
                for each in (settings.model, settings.base)
            )
        ]
        return None if shapes[0] == shapes[1] else "the two models differ in size"


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _model_of(settings: ForkEvaluationSettings, source: Source) -> tuple[str, str]:
    """Return the checkpoint and the name of a source of answers."""
    if source == MODEL:
        return settings.model, settings.model_name
    assert settings.base is not None
    return settings.base, settings.base_name or settings.base


def _prompt_ids(text: ModelText, question: Question) -> list[int]:
    if question.raw_prompt:
        return text.encode_prompt(question.turns[0])
    return text.encode_chat(question.messages(0, ()))


def _replayed(answer: ForkAnswer, end_id: int, *, forked: bool) -> ReplayedAnswer:
    return ReplayedAnswer(
        answer.question_id,
        answer.category,
        answer.prompt_ids,
        answer.threads,
        [*answer.token_ids, end_id],
        forked,
    )


def _run_keys(settings: ForkEvaluationSettings, methods: Sequence[Method]) -> list[RunKey]:
    """Return the runs in an order in which a slow minute of the machine hits all methods alike."""
    return [
        RunKey(requests=requests, method=method, round=number)
        for number in range(settings.repeats)
        for requests in settings.requests
        for method in (methods if number % 2 == 0 else reversed(methods))
    ]
