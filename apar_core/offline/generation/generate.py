"""Questions and answers of a model itself, as training data (Magpie, arXiv 2406.08464).

The model continues its chat template's text before a user's message, which gives a question, and
answers it in a new chat. A share of the questions begins with given words: SmolLM2-135M by itself
hardly ever asks short questions, such as "Give me 5 tips for gardening". A share of the chats goes
on: the model continues the template's text before the user's next message, and answers that too.
Everything generated is logged in files of one line per text. Filters read the logs in the order of
the questions' numbers, and each number has seeds of its own. So the chats do not depend on
interruptions, as far as the engine is deterministic.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from transformers import AutoConfig

from apar_core.errors import DataError, TrainingError
from apar_core.formats.prompt_file import files_fingerprint
from apar_core.json_lines import LineWriter, read_finished_lines
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.data.structure import THOUGHT_CLOSING, THOUGHT_OPENING, extract_tree
from apar_core.offline.evaluation.chat_endpoint import (
    ChatEndpoint,
    EndpointSettings,
    RequestFailedError,
    run_all,
)
from apar_core.offline.generation.filters import SeenQuestions, answer_fault, question_fault
from apar_core.offline.generation.prompt_file import Prompt, read_prompts, read_text_lines
from apar_core.offline.training.chat_format import (
    chat_format,
    chat_token_ids,
    turn_end_id,
    user_turn,
)
from apar_core.offline.training.pretrained import load_tokenizer
from apar_core.reporting import ShowProgress, claim_folder
from apar_core.whole_files import replace_file

SAMPLED_FILE = "sampled.jsonl"
ANSWERS_FILE = "answers.jsonl"
FOLLOW_UPS_FILE = "follow-ups.jsonl"
FOLLOW_UP_ANSWERS_FILE = "follow-up-answers.jsonl"
QUESTIONS_FILE = "questions.jsonl"
CHATS_FILE = "chats.jsonl"
REPORT_FILE = "report.json"

OPENINGS_FILE = Path(__file__).with_name("openings.txt")
"""English words with which questions begin; most ask for a list."""
MAX_QUESTION_TOKENS = 256
"""Longer texts are rarely questions."""
MAX_PROMPT_TOKENS = 2048
"""Room for a question with its system message and history, in the engine's context."""

_TOO_LONG = "prompt too long"
_MIN_KEPT_SHARE = 0.05
_MIN_SAMPLED = 200
_NUM_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 300


class GenerationSettings(BaseModel):
    """Settings of a run, which continues only with the same.

    Only `num_questions` may differ: more questions extend a run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(
        description="Checkpoint folder or Hugging Face name; None if an endpoint answers given "
        "questions."
    )
    model_name: str = Field(description="Name of the model in reports and ids.")
    chat_template: Path | None = Field(None, description="Template instead of the model's own.")
    prompts: Path | None = Field(None, description="File of questions; sampled if None.")
    num_questions: PositiveInt | None = Field(3000, description="All of the file if None.")
    system: str | None = Field(None, description="System message before sampled questions only.")
    opened_share: float = Field(
        0.5, ge=0, le=1, description="Share of the sampled questions that begin with an opening."
    )
    openings: Path = Field(OPENINGS_FILE, description="Text file with one opening per line.")
    follow_up_share: float = Field(
        0.0, ge=0, le=1, description="Share of the answered chats that go on with a second turn."
    )
    question_temperature: NonNegativeFloat = 1.0
    question_top_p: float = Field(0.95, gt=0, le=1)
    temperature: NonNegativeFloat = 0.7
    top_p: float = Field(0.9, gt=0, le=1)
    max_tokens: PositiveInt = Field(512, description="Limit on the tokens of an answer.")
    seed: NonNegativeInt = 0


class Generated(Protocol):
    """Text that an engine generated."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str: ...


class TextEngine(Protocol):
    """Engine that generates many texts at once; `OfflineEngine` is one."""

    def stream(
        self, prompts: Sequence[Any], sampling: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[int, Sequence[Generated]]]:
        """Yield the index and the text of each prompt as soon as it is finished."""

    def shutdown(self) -> None:
        """Free the engine's memory."""


StartEngine = Callable[[int], TextEngine]
"""Starts the model's engine with a context of so many tokens."""


class LogLine(BaseModel):
    """Generated text of one question's number."""

    index: NonNegativeInt
    text: str
    finish_reason: str
    num_tokens: NonNegativeInt


Keep = Callable[[LogLine], None]
"""Stores a line as soon as its text is finished."""


class Rejection(BaseModel):
    """Number of texts that a filter rejected, and the first of them."""

    count: int = 0
    examples: list[str] = []


class TextCounts(BaseModel):
    """Numbers of generated and kept texts, their tokens, and why the others were rejected."""

    generated: int = 0
    tokens: int = 0
    kept: int = 0
    rejected: dict[str, Rejection] = {}

    def add(self, line: LogLine, text: str, fault: str | None) -> bool:
        """Count a generated text, and return whether it is kept: it is if it has no fault."""
        self.generated += 1
        self.tokens += line.num_tokens
        if fault is None:
            self.kept += 1
        else:
            self.reject(fault, text)
        return fault is None

    def reject(self, reason: str, text: str) -> None:
        """Count a rejected text."""
        rejection = self.rejected.setdefault(reason, Rejection())
        rejection.count += 1
        if len(rejection.examples) < _NUM_EXAMPLES:
            rejection.examples.append(text[:_EXAMPLE_CHARACTERS])


class GenerationReport(BaseModel):
    """Settings and counts of a run.

    `answers` are those of all turns; `kinds` counts the kept ones by the paper's rules.
    """

    settings: dict[str, str]
    questions: TextCounts
    follow_ups: TextCounts
    answers: TextCounts
    kinds: Counter[str]
    num_failed: int = Field(0, description="Requests to the endpoint that failed.")
    failures: list[str] = Field([], description="Reasons of the first of them.")


@dataclass(frozen=True, slots=True)
class KeptQuestion:
    """Question that passed the filters, with its number; `prompt` has the turns before it."""

    index: int
    prompt: Prompt


def generate_chats(
    settings: GenerationSettings,
    out: Path,
    start_engine: StartEngine,
    progress: ShowProgress,
    endpoint: EndpointSettings | None = None,
) -> GenerationReport:
    """Generate questions and answers, and write chats, questions and report to `out`.

    The endpoint answers instead of the model, if given. The engine starts only if it is needed.
    Raises DataError, EvaluationError or TrainingError if the run cannot start or continue.
    """
    texts = _ModelTexts(settings)
    prompts = None if settings.prompts is None else read_prompts(settings.prompts)
    if prompts is None:
        # Refuses unusable templates and openings before the engine starts.
        texts.check_headers()
    claimed = _claimed_settings(settings, endpoint)
    claim_folder(out, claimed)
    with ExitStack() as engines:

        @cache
        def engine() -> TextEngine:
            started = start_engine(texts.context_length)
            engines.callback(started.shutdown)
            return started

        if prompts is None:
            questions, counts = _sampled_questions(settings, out, texts, engine, progress)
        else:
            questions, counts = _given_questions(prompts, settings.num_questions)
        _write_lines(out / QUESTIONS_FILE, map(_question_line, questions))
        failures: list[str] = []

        def answered(log: _Log, asked: Sequence[KeptQuestion]) -> Mapping[int, LogLine]:
            by_index = {question.index: question for question in asked}

            def answer(indices: Sequence[int], keep: Keep) -> None:
                missing = [by_index[index] for index in indices]
                if endpoint is None:
                    for line in texts.answers(engine(), missing):
                        keep(line)
                else:
                    failures.extend(asyncio.run(_ask_endpoint(settings, endpoint, missing, keep)))

            return log.completed(list(by_index), progress, answer)

        if endpoint is not None and not settings.follow_up_share:
            # A local engine is no longer needed.
            engines.close()
        report = GenerationReport(
            settings=claimed,
            questions=counts,
            follow_ups=TextCounts(),
            answers=TextCounts(),
            kinds=Counter(),
        )
        log = _Log(out / ANSWERS_FILE, "answers")
        chats = _kept_chats(questions, answered(log, questions), report)
        if settings.follow_up_share:
            asked = _follow_ups(settings, out, texts, engine, progress, chats, report.follow_ups)
            log = _Log(out / FOLLOW_UP_ANSWERS_FILE, "answers of second turns")
            chats |= _kept_chats(asked, answered(log, asked), report)
    report.num_failed, report.failures = len(failures), failures[:_NUM_EXAMPLES]
    _write_lines(
        out / CHATS_FILE,
        (
            {
                "id": f"{settings.model_name}/{settings.seed}/{index}",
                "messages": [message.as_dict() for message in messages],
            }
            for index, messages in chats.items()
        ),
    )
    replace_file(out / REPORT_FILE, report.model_dump_json(indent=1) + "\n")
    return report


@dataclass(frozen=True, slots=True)
class _Log:
    """File of one kind of generated texts, and the title of their progress."""

    file: Path
    title: str

    def completed(
        self,
        indices: Sequence[int],
        progress: ShowProgress,
        generate: Callable[[Sequence[int], Keep], None],
    ) -> dict[int, LogLine]:
        """Return all lines of the file by number, after those with the given numbers were added.

        `generate` is called for the numbers that the file lacks, and passes on each line as it is
        finished. It may leave some out.
        """
        lines = {line.index: line for line in read_finished_lines(self.file, LogLine)}
        missing = [index for index in indices if index not in lines]
        if missing:
            step = progress.start(self.title, len(indices), len(indices) - len(missing))
            with LineWriter(self.file) as log:

                def keep(line: LogLine) -> None:
                    log.append(line)
                    lines[line.index] = line
                    step()

                generate(missing, keep)
        return lines


class _ModelTexts:
    """Prompts and sampling parameters of a model; its tokenizer is loaded when it is needed."""

    def __init__(self, settings: GenerationSettings) -> None:
        self._settings = settings
        self.tokenizer = cache(lambda: load_tokenizer(self._model, settings.chat_template))
        self._turn = cache(lambda: user_turn(self.tokenizer(), settings.system))
        self._openings = cache(lambda: _read_openings(settings.openings))
        self.header_ids = cache(self._header_ids)

    def check_headers(self) -> None:
        """Raise DataError or TrainingError if questions cannot be sampled."""
        for opening in ("", *(self._openings() if self._settings.opened_share else ())):
            self.header_ids(opening)

    def opening(self, index: int, use: str = "opening") -> str:
        """Return the words that begin the question with this number, or none."""
        draws = random.Random(_seed(self._settings.seed, use, index))
        is_opened = draws.random() < self._settings.opened_share
        return draws.choice(self._openings()) if is_opened else ""

    def _header_ids(self, opening: str) -> list[int]:
        """Return the tokens of the text that the model continues with a question."""
        ids = self._text_ids(self._turn().header, opening)
        room = self.context_length - MAX_QUESTION_TOKENS
        if len(ids) > room:
            raise DataError(
                f"the text before a question has {len(ids)} tokens, and {room} fit into the "
                "context: shorten --system or the openings"
            )
        return ids

    def _text_ids(self, header: str, opening: str) -> list[int]:
        # Without an opening, a blank before the message belongs to its first token.
        text = header + opening if opening else header.rstrip(" ")
        return list(self.tokenizer()(text, add_special_tokens=False)["input_ids"])

    @property
    def _model(self) -> str:
        if self._settings.model is None:
            raise DataError("questions can only be sampled, or answered here, with a model")
        return self._settings.model

    @property
    def context_length(self) -> int:
        """Tokens of the longest prompt with its answer, at most the model's positions."""
        config = AutoConfig.from_pretrained(self._model).get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or math.inf
        return int(min(positions, MAX_PROMPT_TOKENS + self._settings.max_tokens))

    def questions(self, engine: TextEngine, indices: Sequence[int]) -> Iterator[LogLine]:
        """Sample the questions with these numbers, and yield them as they finish."""
        openings = {index: self.opening(index) for index in indices}
        headers = {index: self.header_ids(opening) for index, opening in openings.items()}
        yield from self._continued(engine, "question", headers, openings)

    def follow_ups(self, engine: TextEngine, chats: Mapping[int, Prompt]) -> Iterator[LogLine]:
        """Sample a further question for each chat, and yield them as they finish."""
        headers: dict[int, list[int]] = {}
        openings: dict[int, str] = {}
        room = self.context_length - MAX_QUESTION_TOKENS
        for index, messages in chats.items():
            openings[index] = self.opening(index, "follow-up opening")
            header = user_turn(self.tokenizer(), history=messages).header
            headers[index] = self._text_ids(header, openings[index])
            if len(headers[index]) > room:
                del headers[index]
                yield LogLine(index=index, text="", finish_reason=_TOO_LONG, num_tokens=0)
        yield from self._continued(engine, "follow-up", headers, openings)

    def _continued(
        self,
        engine: TextEngine,
        use: str,
        headers: Mapping[int, list[int]],
        openings: Mapping[int, str],
    ) -> Iterator[LogLine]:
        """Yield questions that the model continues headers with, openings included."""
        settings, turn = self._settings, self._turn()
        indices = list(headers)
        sampling = {
            "temperature": settings.question_temperature,
            "top_p": settings.question_top_p,
            "max_tokens": MAX_QUESTION_TOKENS,
            "stop_token_ids": [] if turn.end_id is None else [turn.end_id],
            "stop": [turn.end_text] if turn.end_text else [],
            # Markers of the template become visible to the filters.
            "skip_special_tokens": False,
            "extra_args": {"apar_enabled": False},
        }
        lines = _log_lines(
            engine,
            indices,
            [{"prompt_token_ids": header} for header in headers.values()],
            [sampling | {"seed": _seed(settings.seed, use, index)} for index in indices],
        )
        for line in lines:
            # Words with which nothing was asked are no question.
            opening = openings[line.index] if re.search(r"\w", line.text) else ""
            yield line.model_copy(update={"text": opening + line.text})

    def answers(self, engine: TextEngine, questions: Sequence[KeptQuestion]) -> Iterator[LogLine]:
        """Answer the questions, and yield the answers as they finish."""
        settings, tokenizer = self._settings, self.tokenizer()
        sampling: dict[str, Any] = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_tokens,
            # Markers of thoughts are special tokens in some vocabularies.
            "skip_special_tokens": False,
        }
        # Without such a token the model's own end of sequence counts.
        with suppress(TrainingError):
            sampling["stop_token_ids"] = [turn_end_id(tokenizer)]
        opening = f"{THOUGHT_OPENING}\n" if chat_format(tokenizer).opens_thought else ""
        longest = self.context_length - 1
        indices: list[int] = []
        prompts: list[dict[str, Any]] = []
        for question in questions:
            token_ids = chat_token_ids(question.prompt, tokenizer)
            if len(token_ids) > longest:
                yield LogLine(index=question.index, text="", finish_reason=_TOO_LONG, num_tokens=0)
                continue
            indices.append(question.index)
            prompts.append({"prompt_token_ids": token_ids})
        each = [sampling | {"seed": _seed(settings.seed, "answer", index)} for index in indices]
        for line in _log_lines(engine, indices, prompts, each):
            yield line.model_copy(update={"text": opening + line.text}) if opening else line


def _read_openings(path: Path) -> list[str]:
    openings = read_text_lines(path)
    if not openings:
        raise DataError(f"{path} contains no openings")
    return openings


def _log_lines(
    engine: TextEngine,
    indices: Sequence[int],
    prompts: Sequence[Any],
    sampling: Sequence[Mapping[str, Any]],
) -> Iterator[LogLine]:
    for place, [generated] in engine.stream(prompts, sampling):
        yield LogLine(
            index=indices[place],
            text=generated.text,
            finish_reason=generated.finish_reason,
            num_tokens=len(generated.token_ids),
        )


def _seed(seed: int, use: str, index: int) -> int:
    """Return the seed of one text, of 31 bits: some servers accept no more."""
    digest = hashlib.blake2b(f"{seed} {use} {index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def _sampled_questions(
    settings: GenerationSettings,
    out: Path,
    texts: _ModelTexts,
    engine: Callable[[], TextEngine],
    progress: ShowProgress,
) -> tuple[list[KeptQuestion], TextCounts]:
    """Sample until enough questions pass the filters; return the first of them by number."""
    wanted = settings.num_questions or 1
    log = _Log(out / SAMPLED_FILE, "questions")

    def ask(indices: Sequence[int], keep: Keep) -> None:
        for line in texts.questions(engine(), indices):
            keep(line)

    lines = log.completed((), progress, ask)
    while True:
        questions, counts = _filtered(lines, wanted)
        if len(questions) == wanted:
            return questions, counts
        _check_yield(counts)
        num_sampled = counts.generated
        share = max(len(questions) / num_sampled, _MIN_KEPT_SHARE) if num_sampled else 0.7
        until = num_sampled + math.ceil((wanted - len(questions)) / share * 1.05) + 4
        # An interrupted run may have left out some numbers.
        lines = log.completed(range(until), progress, ask)


def _filtered(lines: Mapping[int, LogLine], wanted: int) -> tuple[list[KeptQuestion], TextCounts]:
    """Return the first `wanted` questions that pass the filters, up to the first missing number."""
    counts = TextCounts()
    seen = SeenQuestions()
    kept: list[KeptQuestion] = []
    index = 0
    while len(kept) < wanted and (line := lines.get(index)) is not None:
        text = line.text.strip()
        if counts.add(line, text, _question_fault(line, text, seen)):
            kept.append(KeptQuestion(index, (ChatMessage("user", text),)))
        index += 1
    return kept, counts


def _question_fault(line: LogLine, text: str, seen: SeenQuestions) -> str | None:
    """Say why a question is not used, or None."""
    if line.finish_reason == _TOO_LONG:
        return _TOO_LONG
    return question_fault(text, is_cut=line.finish_reason == "length") or seen.fault(text)


def _check_yield(counts: TextCounts) -> None:
    if counts.generated < _MIN_SAMPLED or counts.kept >= _MIN_KEPT_SHARE * counts.generated:
        return
    most = sorted(counts.rejected.items(), key=lambda item: -item[1].count)[:3]
    reasons = ", ".join(f"{reason}: {rejection.count}" for reason, rejection in most)
    raise DataError(
        f"only {counts.kept} of {counts.generated} sampled questions are usable ({reasons}), for "
        f"example not {most[0][1].examples[0]!r:.120}: give questions with --prompts, or a model "
        "that writes some after its chat template's user header"
    )


def _given_questions(
    prompts: Sequence[Prompt], wanted: int | None
) -> tuple[list[KeptQuestion], TextCounts]:
    """Return the first questions of a file, without repeated ones."""
    counts = TextCounts(generated=len(prompts))
    known: set[Prompt] = set()
    kept: list[KeptQuestion] = []
    for index, prompt in enumerate(prompts):
        if prompt in known:
            counts.reject("duplicate", prompt[-1].content)
        elif wanted is None or len(kept) < wanted:
            known.add(prompt)
            kept.append(KeptQuestion(index, prompt))
    counts.kept = len(kept)
    return kept, counts


async def _ask_endpoint(
    settings: GenerationSettings,
    endpoint: EndpointSettings,
    questions: Sequence[KeptQuestion],
    keep: Callable[[LogLine], None],
) -> list[str]:
    """Pass the answers to `keep` as they arrive; return why requests failed."""
    failures: list[str] = []

    async def ask(question: KeptQuestion) -> None:
        try:
            completion = await server.complete(
                question.prompt,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=_seed(settings.seed, "answer", question.index),
            )
        except RequestFailedError as error:
            failures.append(f"question {question.index}: {error}")
            return
        text = completion.text
        if completion.thought:
            text = f"{THOUGHT_OPENING}\n{completion.thought}\n{THOUGHT_CLOSING}\n\n{text}"
        keep(
            LogLine(
                index=question.index,
                # JSON can escape half of a surrogate pair, which no file can hold.
                text=text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
                finish_reason=completion.finish_reason,
                num_tokens=completion.completion_tokens,
            )
        )

    async with ChatEndpoint(endpoint) as server:
        await run_all(ask(question) for question in questions)
    return failures


def _follow_ups(
    settings: GenerationSettings,
    out: Path,
    texts: _ModelTexts,
    engine: Callable[[], TextEngine],
    progress: ShowProgress,
    chats: Mapping[int, Prompt],
    counts: TextCounts,
) -> list[KeptQuestion]:
    """Return further questions of a share of the chats, and count all that were sampled."""
    chosen = {
        index: messages
        for index, messages in chats.items()
        if random.Random(_seed(settings.seed, "goes on", index)).random() < settings.follow_up_share
    }

    def ask(indices: Sequence[int], keep: Keep) -> None:
        for line in texts.follow_ups(engine(), {index: chosen[index] for index in indices}):
            keep(line)

    log = _Log(out / FOLLOW_UPS_FILE, "second turns")
    lines = log.completed(list(chosen), progress, ask)
    seen = SeenQuestions()
    kept: list[KeptQuestion] = []
    for index, messages in chosen.items():
        text = lines[index].text.strip()
        if counts.add(lines[index], text, _question_fault(lines[index], text, seen)):
            kept.append(KeptQuestion(index, (*messages, ChatMessage("user", text))))
    return kept


def _kept_chats(
    questions: Sequence[KeptQuestion], answers: Mapping[int, LogLine], report: GenerationReport
) -> dict[int, Prompt]:
    """Return the chats whose answers pass the filters, by number, and count all answers."""
    chats: dict[int, Prompt] = {}
    for question in questions:
        line = answers.get(question.index)
        if line is None:
            continue
        text = line.text.strip()
        fault = (
            _TOO_LONG
            if line.finish_reason == _TOO_LONG
            else answer_fault(text, is_cut=line.finish_reason == "length")
        )
        if not report.answers.add(line, text, fault):
            continue
        report.kinds[extract_tree(text).kind] += 1
        chats[question.index] = (*question.prompt, ChatMessage("assistant", text))
    return chats


def _question_line(question: KeptQuestion) -> dict[str, Any]:
    """Return a question as `--prompts` of evaluations reads it."""
    line: dict[str, Any] = {
        "question_id": str(question.index),
        "prompt": question.prompt[-1].content,
    }
    if len(question.prompt) > 1:
        line["history"] = [message.as_dict() for message in question.prompt[:-1]]
    return line


def _claimed_settings(
    settings: GenerationSettings, endpoint: EndpointSettings | None
) -> dict[str, str]:
    """Return what a continued run must have in common with its start."""
    chosen = settings.model_dump(exclude={"num_questions", "model", "openings"})
    prompts = settings.prompts
    if prompts is not None:
        chosen["prompts"] = f"{prompts.name} with SHA-256 {_sha256(prompts)}"
    if settings.chat_template is not None:
        chosen["chat_template"] = _sha256(settings.chat_template)
    if settings.opened_share:
        chosen["openings"] = _sha256(settings.openings)
    chosen["weights"] = None if settings.model is None else _fingerprint(settings.model)
    chosen["endpoint"] = None if endpoint is None else f"{endpoint.model} at {endpoint.url}"
    # All names, so that an option that is no longer given is noticed too.
    return {name: "none" if value is None else str(value) for name, value in chosen.items()}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fingerprint(model: str) -> str:
    """Return the fingerprint of a folder's weights; the name of a model elsewhere."""
    files = sorted(Path(model).glob("*.safetensors"))
    return files_fingerprint(files, tied=False) if files else model


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    replace_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
