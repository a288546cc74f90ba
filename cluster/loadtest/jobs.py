"""Target server and workload: replayed answers or plain prompts, as request bodies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from apar_core.errors import EvaluationError
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.prompt_sets import Question, load_prompts

_TIMEOUT_S = 20.0


class ModelCard(BaseModel):
    """Model in a server's model list; only vLLM's servers report more than the name."""

    model_config = ConfigDict(extra="ignore")

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _ModelList(BaseModel):
    data: list[ModelCard]


class Target(BaseModel):
    """OpenAI-compatible server; `url` may end with `/v1`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    api_key: str | None = Field(None, repr=False, exclude=True)

    @property
    def base_url(self) -> str:
        """Base URL of the API, ending with `/v1`."""
        url = self.url.rstrip("/") if "://" in self.url else f"http://{self.url.rstrip('/')}"
        return url if url.endswith("/v1") else f"{url}/v1"

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine."""
        return urlsplit(self.base_url).hostname in ("localhost", "127.0.0.1", "::1")

    @property
    def chat_url(self) -> str:
        """URL of chat completions."""
        return f"{self.base_url}/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def server_version(target: Target) -> str | None:
    """Return the version of vLLM behind a server, None if the server does not tell it."""
    url = f"{target.base_url.removesuffix('/v1')}/version"
    try:
        answer = httpx.get(url, headers=target.headers, timeout=_TIMEOUT_S, follow_redirects=True)
        found = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    return str(found["version"]) if isinstance(found, dict) and "version" in found else None


def find_model(target: Target, wanted: str | None) -> ModelCard:
    """Return the model named `wanted`, or the server's only model.

    A server without a model list is accepted if a name is given. Raises EvaluationError if the
    server does not answer, rejects the API key, or lacks the model.
    """
    url = f"{target.base_url}/models"
    try:
        answer = httpx.get(url, headers=target.headers, timeout=_TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EvaluationError(f"--target {target.url}: {url} cannot be reached: {error}") from error
    if answer.status_code in (401, 403):
        raise EvaluationError(
            f"--target {target.url} rejects the API key (HTTP {answer.status_code}); set "
            "the variable that --target-key-env names"
        )
    try:
        answer.raise_for_status()
        cards = _ModelList.model_validate_json(answer.content).data
    except (httpx.HTTPStatusError, ValidationError) as error:
        if wanted is not None:
            return ModelCard(id=wanted)
        raise EvaluationError(
            f"--target {target.url}: {url} lists no models (HTTP {answer.status_code}); set "
            "--model-name"
        ) from error
    return _chosen(target, cards, wanted)


def _chosen(target: Target, cards: list[ModelCard], wanted: str | None) -> ModelCard:
    names = ", ".join(card.id for card in cards)
    for card in cards:
        if card.id == wanted or (wanted is None and len(cards) == 1):
            return card
    if wanted is None:
        raise EvaluationError(f"--target {target.url} has {names or 'no model'}: set --model-name")
    raise EvaluationError(f"--model-name {wanted!r}: {target.url} has {names or 'no model'}")


REPLAY, PROMPTS = "replay", "prompts"
FORMS = (
    f"{REPLAY}:TRACE.jsonl, or {PROMPTS}:NAME with vicuna-bench, mt-bench, held-out, a file of "
    "JSON lines with a prompt each, or a .txt file with one prompt per line"
)


class WorkloadSettings(BaseModel):
    """Workload of a load test.

    `flat` replays without forks. Recorded answers that exceed `context_tokens` together with their
    prompts are skipped. `extra_body` is added to every request body.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: str = Field(description=FORMS)
    flat: bool = False
    requests: PositiveInt | None = None
    tokenizer: str | None = None
    context_tokens: PositiveInt | None = None
    max_tokens: PositiveInt = 512
    temperature: float = 0.0
    ignore_eos: bool = False
    questions: Path | None = None
    extra_body: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send; `text_tokens` is the expected length of its answer, if known."""

    id: str
    category: str
    messages: tuple[ChatMessage, ...]
    body: bytes
    text_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedJobs:
    """Jobs of a repeat in order.

    The last `repeated` jobs are repetitions of earlier ones. `left_out` recorded answers were
    skipped because they were too long.
    """

    jobs: Sequence[Job]
    left_out: int = 0
    repeated: int = 0


def build_jobs(settings: WorkloadSettings, card: ModelCard) -> PlannedJobs:
    """Return the requested number of jobs, repeating the workload if it has fewer.

    Raises EvaluationError if the workload cannot be read.
    """
    kind, colon, name = settings.spec.partition(":")
    if not colon or not name or kind not in (REPLAY, PROMPTS):
        raise EvaluationError(f"workload {settings.spec!r}: expected {FORMS}")
    if settings.flat and kind != REPLAY:
        raise EvaluationError("--no-fork is only for --replay")
    if kind == REPLAY:
        jobs, left_out = _replay_jobs(name, settings, card)
    else:
        jobs, left_out = _prompt_jobs(name, settings, card), 0
    if not jobs:
        raise EvaluationError(f"{settings.spec!r} contains no chat prompt")
    wanted = settings.requests or len(jobs)
    sent = [jobs[index % len(jobs)] for index in range(wanted)]
    return PlannedJobs(sent, left_out, repeated=max(wanted - len(jobs), 0))


def _replay_jobs(name: str, settings: WorkloadSettings, card: ModelCard) -> tuple[list[Job], int]:
    """Return the jobs and the number of skipped answers."""
    # transformers takes seconds to import, and plain prompts do not need it.
    from apar_core.offline.evaluation.replay_text import load_text
    from cluster.loadtest.replay_answers import replay_answers
    from cluster.loadtest.trace import read_trace

    text = load_text(_tokenizer(settings, card))
    context = settings.context_tokens or card.max_model_len
    answers, left_out = replay_answers(
        read_trace(Path(name)), text, text.tokens, max_tokens=context, wanted=settings.requests
    )
    jobs = [
        Job(
            answer.answer_id,
            answer.category,
            answer.messages,
            _body(
                card.id,
                answer.messages,
                {"max_tokens": answer.max_tokens, "temperature": 0.0}
                | {"apar": answer.apar_field(forked=not settings.flat)}
                | settings.extra_body,
            ),
            answer.text_tokens,
        )
        for answer in answers
    ]
    return jobs, left_out


def _tokenizer(settings: WorkloadSettings, card: ModelCard) -> str:
    if settings.tokenizer is not None:
        return settings.tokenizer
    for name in (card.root, card.id):
        if name is not None and Path(name).is_dir():
            return name
    raise EvaluationError(
        f"{settings.spec}: a replay needs the model's tokenizer; set --tokenizer to "
        f"the checkpoint folder of {card.id!r}"
    )


def _prompt_jobs(name: str, settings: WorkloadSettings, card: ModelCard) -> list[Job]:
    options: dict[str, Any] = {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
    }
    if settings.ignore_eos:
        options["ignore_eos"] = True
    return [
        Job(
            question.question_id,
            question.category,
            messages,
            _body(card.id, messages, options | settings.extra_body),
        )
        for question in _questions(name, settings.questions)
        if (messages := question.messages(0, ())) and not question.raw_prompt
    ]


def _questions(name: str, folder: Path | None) -> Sequence[Question]:
    """Return the questions of a prompt set; only the first turn of each is used."""
    path = Path(name)
    if path.suffix != ".txt":
        return load_prompts(name, folder)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from error
    questions = [
        Question(question_id=str(number), category="other", turns=(line,))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise EvaluationError(f"{path} contains no prompt")
    return questions


def _body(model: str, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> bytes:
    return json.dumps(
        {
            "model": model,
            "messages": [message.as_dict() for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
    ).encode()
