"""The field `apar` of a request: whether and how it forks, and what it shall generate."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, PositiveInt, ValidationError

from apar_core.engine.replay_request import PARAM, REPLAY_REQUEST_ARG
from apar_core.errors import RequestError

MAX_REPLAY_TOKENS = 2**17
MAX_REPLAY_THREADS = 2**12
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")


def _bounded(scripts: dict[str, list[int]]) -> dict[str, list[int]]:
    num_tokens = sum(map(len, scripts.values()))
    if num_tokens > MAX_REPLAY_TOKENS or len(scripts) > MAX_REPLAY_THREADS:
        raise ValueError(
            f"{num_tokens} tokens in {len(scripts)} threads are too many: at most "
            f"{MAX_REPLAY_TOKENS} in {MAX_REPLAY_THREADS}"
        )
    return scripts


class AparOptions(BaseModel):
    """What a client may say about the forks of its request.

    `replay` holds the token ids that each thread shall generate, by its path. Only its form is
    checked here, the rest by the engine's input processor, which knows the vocabulary.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enabled: bool | None = None
    max_threads: PositiveInt | None = None
    replay: Annotated[dict[str, list[int]], AfterValidator(_bounded)] | None = None

    def engine_args(self) -> dict[str, int | str]:
        """The internal keys of `SamplingParams.extra_args`; vLLM's field has only flat values.

        What the client leaves open is the engine's to decide.
        """
        given = {"apar_enabled": self.enabled, "apar_max_threads": self.max_threads}
        args: dict[str, int | str] = {
            name: int(value) for name, value in given.items() if value is not None
        }
        if self.replay is not None:
            args[REPLAY_REQUEST_ARG] = json.dumps(self.replay, separators=(",", ":"))
        return args


def parse_options(value: object) -> AparOptions:
    """The checked `apar` field; raises RequestError naming the wrong key."""
    if not isinstance(value, dict):
        raise RequestError("`apar` must be an object", param="apar")
    try:
        return AparOptions.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(["apar", *(str(part) for part in problem["loc"])])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(AparOptions.model_fields)
            raise RequestError(f"Unknown key `{name}`; known: {known}", param=name) from error
        raise RequestError(f"`{name}`: {problem['msg']}", param=name) from error


def fit_replay(
    body: dict[str, Any], scripts: Mapping[str, list[int]], control_token_ids: frozenset[int]
) -> None:
    """Let the answer be as long as what it repeats, unless the client has set a limit itself.

    Raises RequestError for a beam search, whose beams are chosen among several tokens.
    """
    if body.get("use_beam_search"):
        raise RequestError(f"`{PARAM}` is impossible in a beam search", param=PARAM)
    if all(body.get(name) is None for name in _TOKEN_LIMITS):
        text_ids = [
            token_id
            for token_ids in scripts.values()
            for token_id in token_ids
            if token_id not in control_token_ids
        ]
        # End tokens are no text, but for one: the last thread must not be cut off before its own.
        body["max_tokens"] = max(1, len(text_ids) - len(scripts) + 1)
