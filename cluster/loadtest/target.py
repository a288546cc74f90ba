"""The server that is tested: its address, what it serves, how to ask it."""

from __future__ import annotations

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from apar_core.errors import EvaluationError

_TIMEOUT_S = 20.0


class ModelCard(BaseModel):
    """What a server says of a model; only vLLM's servers have more than the name."""

    model_config = ConfigDict(extra="ignore")

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _ModelList(BaseModel):
    data: list[ModelCard]


class Target(BaseModel):
    """An OpenAI-compatible server; `url` with or without the `/v1` at its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    api_key: str | None = Field(None, repr=False, exclude=True)

    @property
    def base_url(self) -> str:
        """The address below which the API lies."""
        url = self.url.rstrip("/") if "://" in self.url else f"http://{self.url.rstrip('/')}"
        return url if url.endswith("/v1") else f"{url}/v1"

    @property
    def chat_url(self) -> str:
        """Where chats are sent."""
        return f"{self.base_url}/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def find_model(target: Target, wanted: str | None) -> ModelCard:
    """Return the model called `wanted`, or the only one of the server.

    A server without a list of models is taken at its word if the name is given. Raises
    EvaluationError if the server does not answer, refuses the key, or has no such model.
    """
    url = f"{target.base_url}/models"
    try:
        answer = httpx.get(url, headers=target.headers, timeout=_TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EvaluationError(f"--target {target.url}: {url} cannot be reached: {error}") from error
    if answer.status_code in (401, 403):
        raise EvaluationError(
            f"--target {target.url} refuses the API key (HTTP {answer.status_code}); --api-key-env "
            "names the variable with the key"
        )
    try:
        answer.raise_for_status()
        cards = _ModelList.model_validate_json(answer.content).data
    except (httpx.HTTPStatusError, ValidationError) as error:
        if wanted is not None:
            return ModelCard(id=wanted)
        raise EvaluationError(
            f"--target {target.url}: {url} lists no models (HTTP {answer.status_code}); name one "
            "with --model-name"
        ) from error
    return _chosen(target, cards, wanted)


def _chosen(target: Target, cards: list[ModelCard], wanted: str | None) -> ModelCard:
    names = ", ".join(card.id for card in cards)
    for card in cards:
        if card.id == wanted or (wanted is None and len(cards) == 1):
            return card
    if wanted is None:
        raise EvaluationError(
            f"--target {target.url} has {names or 'no model'}: choose by --model-name"
        )
    raise EvaluationError(f"--model-name {wanted!r}: {target.url} has {names or 'no model'}")
