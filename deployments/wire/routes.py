"""The routes of the API: what each path's body holds, how it is refused, and how its answer ends.

Gateway, relay, replica and the OpenAPI description read this table. vLLM's other routes are not
relayed: they take token ids or control the engine.

Whatever its shape, a prompt that comes as text is tokenized by vLLM, and the engine's input
processor spells control tokens out. It also refuses their ids in prompts and parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class ResponseForm(Enum):
    """Form of errors and grammar of streams.

    `CHUNKS`: OpenAI's errors; unnamed events up to `[DONE]`. `RESPONSES`: OpenAI's errors; named,
    numbered events up to `response.completed`. `MESSAGES`: Anthropic's errors; named events up to
    `message_stop`.
    """

    CHUNKS = "chunks"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class BodyShape:
    """The fields of a body that hold the prompt and bound the answer.

    `texts` hold text at any depth and come before the conversation. `turns` is a text or a list of
    messages. Each of `prompts` is a text, a list of token ids, or a list of either. `limits` bound
    the answer's tokens. `answer_format` is the path to an object whose `type` is not `text` if a
    grammar constrains the answer.
    """

    texts: tuple[str, ...] = ()
    turns: str | None = None
    prompts: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    answer_format: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """One path of the API.

    `engine_id` makes the id that the engine knows a request by, from the one in `x-request-id`;
    None if the request does not reach the engine. `forks` is set if answers are generated, so that
    the field `apar` is allowed. `refused` are fields that must be absent or false, and why.
    """

    method: str
    shape: BodyShape = BodyShape()
    engine_id: str | None = None
    forks: bool = False
    form: ResponseForm = ResponseForm.CHUNKS
    refused: Mapping[str, str] = field(default_factory=dict)


OPENAI_SHAPE = BodyShape(
    texts=("tools", "documents"),
    turns="messages",
    # vLLM decides by the route which of them it reads, so all count.
    prompts=("prompt", "input"),
    limits=("max_completion_tokens", "max_tokens"),
    answer_format=("response_format",),
)
"""Chat completions and completions."""
_RESPONSES = BodyShape(
    texts=("instructions", "tools", "previous_input_messages"),
    turns="input",
    limits=("max_output_tokens",),
    answer_format=("text", "format"),
)
_MESSAGES = BodyShape(
    texts=("system", "tools"),
    turns="messages",
    limits=("max_tokens",),
    answer_format=("output_config", "format"),
)
_POOLING = BodyShape(turns="messages", prompts=("input",))
_SCORING = BodyShape(
    texts=("instruction",),
    prompts=("queries", "query", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
)
_NOT_STORED = "responses are not stored; send the earlier items in `input`"
_SCORE = Route("POST", _SCORING, "score-{}")

MODELS_PATH = "/v1/models"
ONE_MODEL = "/v1/models/"
"""Start of the path of one model; its name follows, which may contain slashes."""
OPENAPI_PATH = "/openapi.json"
ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": Route(
        "POST",
        OPENAI_SHAPE,
        "chatcmpl-{}",
        forks=True,
        refused={"store": "chats are not stored"},
    ),
    "/v1/completions": Route("POST", OPENAI_SHAPE, "cmpl-{}", forks=True),
    "/v1/responses": Route(
        "POST",
        _RESPONSES,
        # vLLM numbers the turns that built-in tools lead to; `apar serve` has no such tools.
        "resp_{}_0",
        forks=True,
        form=ResponseForm.RESPONSES,
        refused={
            "store": _NOT_STORED,
            "background": _NOT_STORED,
            "previous_response_id": _NOT_STORED,
            "conversation": _NOT_STORED,
            "request_id": "send the header `x-request-id`",
        },
    ),
    "/v1/messages": Route(
        "POST",
        _MESSAGES,
        "chatcmpl-{}",
        forks=True,
        form=ResponseForm.MESSAGES,
    ),
    "/v1/messages/count_tokens": Route("POST", _MESSAGES, form=ResponseForm.MESSAGES),
    "/v1/embeddings": Route("POST", _POOLING, "embd-{}"),
    "/pooling": Route("POST", _POOLING, "pooling-{}"),
    "/classify": Route("POST", _POOLING, "classify-{}"),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _SCORE,
    "/v1/rerank": _SCORE,
    "/v2/rerank": _SCORE,
    MODELS_PATH: Route("GET"),
    "/tokenize": Route("POST", OPENAI_SHAPE),
    "/detokenize": Route("POST", BodyShape(prompts=("tokens",))),
    "/version": Route("GET"),
    OPENAPI_PATH: Route("GET"),
}

STORED_RESPONSES = "/v1/responses/"
"""Start of the paths of stored responses, of which there are none."""


def form_of(path: str) -> ResponseForm:
    """Return the form of a path's answers; for an unknown path, OpenAI's."""
    route = ROUTES.get(path)
    return ResponseForm.CHUNKS if route is None else route.form


def generates(path: str) -> bool:
    """Return whether requests to a path generate text."""
    route = ROUTES.get(path)
    return route is not None and route.forks
