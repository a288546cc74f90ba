"""An OpenAI-compatible endpoint: limited concurrency, retries with backoff, token counts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import openai
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from apar_core.errors import EvaluationError
from apar_core.offline.data.records import ChatMessage

_TOO_MANY_REQUESTS, _SERVER_ERRORS = 429, 500
_RETRIED_CODES = (408, 409, _TOO_MANY_REQUESTS)
# An address that has never answered is probably wrong; nobody wants to wait long to hear it.
_FIRST_CONTACT_RETRIES = 2


TokenLimitField = Literal["max_tokens", "max_completion_tokens"]


class EndpointSettings(BaseModel):
    """Address of an endpoint, with its retry and timeout limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(description="Base URL, as the OpenAI client takes it (with /v1).")
    model: str
    api_key: str = Field("none", repr=False)
    concurrency: PositiveInt = Field(8, description="Requests under way at once.")
    retries: NonNegativeInt = Field(5, description="After the first attempt at a request.")
    first_wait_s: PositiveFloat = Field(1.0, description="Before the first retry; then doubled.")
    longest_wait_s: PositiveFloat = 60.0
    timeout_s: PositiveFloat = 300.0
    token_limit_field: TokenLimitField = Field(
        "max_tokens",
        description="Field that limits an answer; reasoning models take max_completion_tokens.",
    )


class RequestFailedError(EvaluationError):
    """One request failed for good; others may still succeed."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one chat and what it cost; `attempts` counts from 1."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    attempts: int


class ChatEndpoint:
    """Sends chats to one model. Use it as an async context manager, in one event loop.

    `sleep` waits a number of seconds.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.settings = settings
        self._sleep = sleep
        self._reached = False
        self._free = asyncio.Semaphore(settings.concurrency)
        self._client = AsyncOpenAI(
            base_url=settings.url,
            api_key=settings.api_key,
            max_retries=0,
            timeout=settings.timeout_s,
        )

    async def __aenter__(self) -> ChatEndpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int | None,
        temperature: float | None,
    ) -> Completion:
        """Return the model's answer to a chat. A limit or temperature of None is not sent.

        Raises RequestFailedError if this request fails for good, and EvaluationError if every other
        one would fail too (address, key or model are wrong).
        """
        for attempt in range(1, self.settings.retries + 2):
            try:
                async with self._free:
                    return await self._ask(messages, max_tokens, temperature, attempt)
            # A ValueError is an answer that is no completion.
            except (openai.APIError, ValueError) as error:
                self._reached |= not isinstance(error, openai.APIConnectionError)
                if not _worth_retrying(error) or attempt > self._retries:
                    raise self._failure(error, attempt) from error
                await self._sleep(self._wait_s(error, attempt))
        raise RequestFailedError("no attempt was made")

    async def _ask(
        self,
        messages: Sequence[ChatMessage],
        max_tokens: int | None,
        temperature: float | None,
        attempt: int,
    ) -> Completion:
        options: dict[str, Any] = {}
        if max_tokens is not None:
            options[self.settings.token_limit_field] = max_tokens
        if temperature is not None:
            options["temperature"] = temperature
        answer: Any = await self._client.chat.completions.create(
            model=self.settings.model,
            messages=[message.as_dict() for message in messages],  # type: ignore[misc]
            **options,
        )
        self._reached = True
        if not getattr(answer, "choices", None) or answer.choices[0].message.content is None:
            raise ValueError("the answer is no chat completion with a text")
        usage = answer.usage
        return Completion(
            answer.choices[0].message.content,
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            attempt,
        )

    @property
    def _retries(self) -> int:
        retries = self.settings.retries
        return retries if self._reached else min(retries, _FIRST_CONTACT_RETRIES)

    def _wait_s(self, error: Exception, attempt: int) -> float:
        """Return what the server asks for, else a doubled wait with up to a quarter of jitter."""
        asked = _retry_after_s(error)
        if asked is not None:
            return min(asked, self.settings.longest_wait_s)
        doubled = self.settings.first_wait_s * 2.0 ** (attempt - 1)
        return min(doubled * random.uniform(1.0, 1.25), self.settings.longest_wait_s)

    def _failure(self, error: Exception, attempts: int) -> EvaluationError:
        url, model = self.settings.url, self.settings.model
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return EvaluationError(f"{url} refuses the API key: {_reason(error)}")
        if isinstance(error, openai.NotFoundError):
            return EvaluationError(f"{url} has no model {model!r}: {_reason(error)}")
        if isinstance(error, openai.APITimeoutError):
            return RequestFailedError(
                f"{url} did not answer within {self.settings.timeout_s:g} s, {attempts} times"
            )
        if isinstance(error, openai.APIConnectionError):
            return EvaluationError(
                f"{url} cannot be reached ({attempts} attempts): {_reason(error)}"
            )
        return RequestFailedError(f"{url}, {attempts} attempts: {_reason(error)}")


async def run_all(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all jobs at once; the first error of any of them ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(job)
    except ExceptionGroup as group:
        known = group.subgroup(EvaluationError)
        raise (known or group).exceptions[0] from group


def _worth_retrying(error: Exception) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code in _RETRIED_CODES or error.status_code >= _SERVER_ERRORS
    # Without a status nothing came back, or what came back is no completion.
    return True


def _retry_after_s(error: Exception) -> float | None:
    if not isinstance(error, openai.APIStatusError):
        return None
    try:
        return max(0.0, float(error.response.headers.get("retry-after", "")))
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, openai.APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        message = body.get("message") or error.message
        return f"HTTP {error.status_code}, {message}"
    return str(cause) if cause is not None and str(cause) else str(error)
