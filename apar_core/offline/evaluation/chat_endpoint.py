"""Client of an OpenAI-compatible endpoint: limited concurrency, retries, token counts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import openai
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from apar_core.errors import EvaluationError
from apar_core.offline.data.records import ChatMessage

# An unreachable address is reported in about a minute, with all retries.
_CONNECT_TIMEOUT_S = 10.0

TokenLimitField = Literal["max_tokens", "max_completion_tokens"]


class EndpointSettings(BaseModel):
    """Address of an endpoint, with its concurrency, retry and timeout limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(description="Base URL, including /v1.")
    model: str
    api_key: str = Field("none", repr=False)
    concurrency: PositiveInt = Field(8, description="Maximum number of concurrent requests.")
    retries: NonNegativeInt = Field(5, description="Retries of a failed request, with backoff.")
    timeout_s: PositiveFloat = 300.0
    token_limit_field: TokenLimitField = Field(
        "max_tokens",
        description="Field that limits the answer; reasoning models take max_completion_tokens.",
    )


class RequestFailedError(EvaluationError):
    """One request failed; others may still succeed."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Answer to a chat and its token counts.

    `thought` is what a server with a reasoning parser returns apart from the text.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str = "stop"
    thought: str = ""


class ChatEndpoint:
    """Sends chats to one model. Use it as an async context manager in one event loop."""

    def __init__(self, settings: EndpointSettings) -> None:
        self.settings = settings
        self._free = asyncio.Semaphore(settings.concurrency)
        self._client = AsyncOpenAI(
            base_url=settings.url,
            api_key=settings.api_key,
            max_retries=settings.retries,
            timeout=openai.Timeout(
                settings.timeout_s, connect=min(settings.timeout_s, _CONNECT_TIMEOUT_S)
            ),
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
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Return the model's answer to a chat. What is None is not sent.

        Raises RequestFailedError if this request fails, and EvaluationError if all others would
        fail too because address, key or model are wrong.
        """
        options: dict[str, Any] = {}
        if max_tokens is not None:
            options[self.settings.token_limit_field] = max_tokens
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        options |= {name: value for name, value in sampling.items() if value is not None}
        try:
            async with self._free:
                answer: Any = await self._client.chat.completions.create(
                    model=self.settings.model,
                    messages=[message.as_dict() for message in messages],  # type: ignore[misc]
                    **options,
                )
        # The client raises ValueError for an answer that is not JSON.
        except (openai.APIError, ValueError) as error:
            raise self._failure(error) from error
        message = answer.choices[0].message if getattr(answer, "choices", None) else None
        thought = _thought(message)
        if message is None or (message.content is None and not thought):
            raise RequestFailedError(f"{self.settings.url}: the answer is not a chat completion")
        usage = answer.usage
        return Completion(
            # A thought that was cut off has no answer.
            message.content or "",
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            answer.choices[0].finish_reason or "stop",
            thought,
        )

    def _failure(self, error: Exception) -> EvaluationError:
        url, model, retries = self.settings.url, self.settings.model, self.settings.retries
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return EvaluationError(f"{url} refuses the API key: {_reason(error)}")
        if isinstance(error, openai.NotFoundError):
            return EvaluationError(f"{url} has no model {model!r}: {_reason(error)}")
        # The cause is an exception of openai's HTTP library, which differs between versions.
        connected = type(error.__cause__).__name__ != "ConnectTimeout"
        if isinstance(error, openai.APITimeoutError) and connected:
            return RequestFailedError(
                f"{url} did not answer within {self.settings.timeout_s:g} s ({retries} retries)"
            )
        if isinstance(error, openai.APIConnectionError):
            return EvaluationError(f"{url} cannot be reached ({retries} retries): {_reason(error)}")
        return RequestFailedError(f"{url}: {_reason(error)}")


async def run_all(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all jobs concurrently; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(job)
    except ExceptionGroup as group:
        known = group.subgroup(EvaluationError)
        raise (known or group).exceptions[0] from group


def _thought(message: Any) -> str:
    """Return the thought that vLLM (`reasoning`) or others (`reasoning_content`) send apart."""
    for field in ("reasoning", "reasoning_content"):
        thought = getattr(message, field, None)
        if isinstance(thought, str) and thought:
            return thought
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, openai.APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        return f"HTTP {error.status_code}, {body.get('message') or error.message}"
    cause = error.__cause__
    return str(cause) if cause is not None and str(cause) else str(error)
