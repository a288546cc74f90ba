"""Build the engine of a replica, and vLLM's HTTP application on top of it."""

import functools
import logging
from argparse import Action, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.routing import Route
from vllm import AsyncEngineArgs, envs
from vllm.exceptions import VLLMError, VLLMValidationError

from apar_core.checkpoint_folder import ADAPTER_CONFIG
from apar_core.engine.async_engine import SCHEDULER_CLS, AparAsyncLLM
from apar_core.engine.fork_adapter import lora_rank
from apar_core.engine.input_processor import forks
from apar_core.errors import CheckpointError
from apar_core.metrics.counting import Counter, Histogram
from apar_core.scheduler.fork_settings import check_engine, fork_settings
from apar_core.suggestions import did_you_mean
from apar_core.vllm_names import (
    DetokenizeRequest,
    FlexibleArgumentParser,
    LoRAModulePath,
    PrometheusStatLogger,
    ResponsesRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    UsageContext,
    actions_of,
    bound_truncated_texts,
    build_app,
    init_app_state,
    make_arg_parser,
)
from deployments.replica.apar_extension import Parsers
from deployments.replica.openapi import OFFERED, describe
from deployments.replica.stream_start import start_streams_late
from deployments.wire.errors import UnknownRouteError, response_for
from deployments.wire.routes import MODELS_PATH, OPENAPI_PATH, ROUTES, form_of

logger = logging.getLogger(__name__)

_CHANGED = "_apar_changes_tokenization"

_UNUSED_MIDDLEWARE = ("CORSMiddleware", "PrometheusInstrumentatorMiddleware")


def server_arguments(model: str, served_name: str, engine: Mapping[str, Any]) -> Namespace:
    """vLLM's server arguments: its defaults, then ours, then the given engine arguments.

    Raises CheckpointError for an engine argument that vLLM does not have, or a wrong value.
    """
    parser = make_arg_parser(FlexibleArgumentParser())
    args: Namespace = parser.parse_args([])
    actions = actions_of(parser)
    values = {
        "model": model,
        "served_model_name": [served_name],
        "scheduler_cls": SCHEDULER_CLS,
        "enable_prefix_caching": True,
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
        **engine,
    }
    for name, value in values.items():
        if not hasattr(args, name):
            raise CheckpointError(
                f"vLLM has no engine argument {name!r}{did_you_mean(name, vars(args))}"
            )
        checked = _scalar(name, value, actions.get(name))
        setattr(args, name, _parsed(name, checked, default=getattr(args, name)))
    if args.enable_prefix_caching is False and args.runner != "pooling":
        raise CheckpointError(
            "engine argument 'enable_prefix_caching': forks share their parent's KV blocks through "
            "prefix caching: remove it, or set `runner: pooling` if the model generates no text"
        )
    # Without it, vLLM refuses the default `tool_choice`.
    if args.tool_call_parser and "enable_auto_tool_choice" not in engine:
        args.enable_auto_tool_choice = True
    if adapters := engine.get("lora_modules"):
        args.lora_modules = [LoRAModulePath(**adapter) for adapter in adapters]
        if "max_lora_rank" not in engine:
            args.max_lora_rank = _rank_for(args.lora_modules, args.max_lora_rank)
    return args


def parsers_of(args: Namespace) -> Parsers:
    """Return which parsers the server arguments give the model's answers."""
    thoughts = args.structured_outputs_config.reasoning_parser or args.reasoning_parser
    return Parsers(
        tools=bool(args.tool_call_parser), reasoning=bool(thoughts or args.reasoning_config)
    )


def _scalar(name: str, value: Any, action: Action | None) -> Any:
    """Return a plain value as vLLM's command line reads it (`2k` is 2000), others unchanged."""
    if action is None or not isinstance(value, str | int | float):
        return value
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise CheckpointError(f"engine argument {name!r}: {value!r} is not true or false")
        return value
    is_number = action.type in (int, float) or "human_readable" in str(action.type)
    if (isinstance(value, bool) and not is_number) or not callable(action.type) or action.nargs:
        return value
    # YAML reads 1e3 as a floating-point number.
    is_whole = isinstance(value, float) and value.is_integer() and action.type is not float
    try:
        read = action.type(str(int(value) if is_whole and is_number else value))
    except (ArgumentTypeError, TypeError, ValueError) as error:
        raise CheckpointError(f"engine argument {name!r}: {value!r}: {error}") from error
    if action.choices is not None and read not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise CheckpointError(f"engine argument {name!r}: {value!r} is none of {choices}")
    return read


def _parsed(name: str, value: Any, *, default: Any) -> Any:
    """Return a mapping as the object that vLLM's command line makes of it, others unchanged."""
    if not isinstance(value, dict) or default is None or isinstance(default, dict):
        return value
    try:
        return type(default)(**value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"engine argument {name!r}: {error}") from error


def _rank_for(adapters: Sequence[LoRAModulePath], default: int) -> int:
    """Return the rank for these adapters, or `default` if one is not a folder on this machine."""
    folders = [Path(adapter.path) for adapter in adapters]
    if not all((folder / ADAPTER_CONFIG).is_file() for folder in folders):
        return default
    return lora_rank(folders)


class StatLogger(PrometheusStatLogger):
    """vLLM's metrics, counted with less work: they take most of the time of all metrics."""

    _counter_cls = Counter
    _histogram_cls = Histogram


def build_engine(args: Namespace) -> AparAsyncLLM:
    """Build the engine and start its process; call inside the event loop that will use it.

    Raises CheckpointError for a scheduler that is not derived from ours, and EngineError for
    settings under which vLLM or the forks would fail later.
    """
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
    if not forks(config):
        raise CheckpointError(
            f"engine.scheduler_cls: {args.scheduler_cls!r} is not derived from {SCHEDULER_CLS}"
        )
    check_engine(config)
    engine = AparAsyncLLM.from_vllm_config(
        config, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[StatLogger]
    )
    return cast(AparAsyncLLM, engine)


async def build_http_application(engine: AparAsyncLLM, args: Namespace) -> FastAPI:
    """Build vLLM's OpenAI server on top of the engine, to be called in process."""
    tasks = await engine.get_supported_tasks()
    tokenize_responses_as_chats()
    bound_tokenization()
    app = build_app(args, tasks, engine.model_config)
    remove_unused_middleware(app)
    await init_app_state(engine, app.state, args, tasks)
    start_streams_late(app.state)
    # As in the engine process: reading the environment at every step costs time.
    envs.enable_envs_cache()
    refuse_unreadable_bodies(app)
    add_description(app)
    add_cards(app, engine)
    refuse_missing_routes(app, args.served_model_name[0])
    app.state.server = Namespace()  # vLLM's error handler looks for its uvicorn server here.
    return app


def tokenize_responses_as_chats() -> None:
    """Tokenize the prompts of the Responses API without further special tokens.

    The chat template has written them. vLLM 0.32 adds them once more, so that a prompt begins with
    two tokens of the beginning, and the texts of both APIs differ.
    """
    _change_tokenization(
        ResponsesRequest, lambda params, _: replace(params, add_special_tokens=False)
    )


def bound_tokenization() -> None:
    """Refuse texts, before they are tokenized, that exceed what the model's context can hold.

    vLLM does so for prompts. Tokens take a hundred times the memory of their text.
    """
    bound_truncated_texts()
    for request_class in (TokenizeCompletionRequest, TokenizeChatRequest, DetokenizeRequest):
        _change_tokenization(
            request_class,
            lambda params, config: replace(params, max_total_tokens=config.max_model_len),
        )


def _change_tokenization(request_class: Any, change: Callable[[Any, Any], Any]) -> None:
    """Change how a class of requests is tokenized; may be called more than once."""
    original: Any = request_class.build_tok_params
    if hasattr(original, _CHANGED):
        return

    @functools.wraps(original)
    def build_tok_params(self: Any, model_config: Any) -> Any:
        return change(original(self, model_config), model_config)

    setattr(build_tok_params, _CHANGED, True)
    setattr(request_class, original.__name__, build_tok_params)


def add_cards(app: FastAPI, engine: AparAsyncLLM) -> None:
    """Add to each model of the list what forks mean for it, and the paths that it serves."""
    served = {getattr(route, "path", None) for route in app.routes}
    apis = [path for path, route in ROUTES.items() if route.method == "POST" and path in served]
    marked, settings = engine.format, fork_settings(engine.vllm_config)

    def card(name: str) -> dict[str, Any]:
        if marked is None:
            return {"forks": False, "format": None, "apis": apis}
        return {
            "forks": settings.adapters.get(name, settings.enabled),
            "format": marked.definition.name,
            "parent": marked.definition.parent,
            "control_tokens": {text: token_id for token_id, text in sorted(marked.texts.items())},
            "max_threads": settings.max_threads,
            "max_forks": settings.max_forks,
            "apis": apis,
        }

    async def show(request: Request) -> Response:
        listed = await request.app.state.openai_serving_models.show_available_models()
        cards = listed.model_dump(mode="json")
        for each in cards["data"]:
            each["apar"] = card(each["id"])
        return JSONResponse(cards)

    # Before vLLM's own route, which stays in the OpenAPI description.
    app.router.routes.insert(0, Route(MODELS_PATH, show, methods=["GET"]))


def remove_unused_middleware(app: FastAPI) -> None:
    """Remove middleware that handles every piece of an answer for nothing.

    The gateway decides about cross-origin requests. The counts of HTTP requests are not exported:
    the gateway has its own, which include the requests that it refuses.
    """
    app.user_middleware = [
        each
        for each in app.user_middleware
        if getattr(each.cls, "__name__", None) not in _UNUSED_MIDDLEWARE
    ]
    app.middleware_stack = None  # vLLM has built it; the first request builds it again.


def refuse_unreadable_bodies(app: FastAPI) -> None:
    """Answer a body that vLLM's own checks fail on with 400, as one that they refuse.

    vLLM looks into a body before the types of its fields are checked. An exception there is not one
    of pydantic's errors, and would be answered with 500, as a fault of the server.
    """

    def checked(validate: Any) -> Any:
        def check(value: Any, *args: Any, loc: tuple[int | str, ...] = (), **kwargs: Any) -> Any:
            try:
                return validate(value, *args, loc=loc, **kwargs)
            except VLLMError:
                raise  # Has its own answer.
            except Exception as error:
                logger.warning("request refused: its body cannot be read", exc_info=error)
                raise VLLMValidationError(
                    "The body cannot be read: one of its fields, or a part of one, has a wrong "
                    f"type ({error})"
                ) from error

        return check

    for route in app.routes:
        for field in route.dependant.body_params if isinstance(route, APIRoute) else ():
            # Attributes of this one field; the class is FastAPI's.
            vars(field)["validate"] = checked(field.validate)


def refuse_missing_routes(app: FastAPI, model: str) -> None:
    """Answer requests that the model does not serve, such as a chat with an embedding model."""

    async def refuse(request: Request) -> Response:
        error = UnknownRouteError(f"The model {model!r} does not serve {request.url.path}")
        answer = response_for(error).in_form(form_of(request.url.path))
        return Response(answer.body, answer.status, media_type="application/json")

    served = {getattr(route, "path", None) for route in app.routes}
    posted = {path for path, route in ROUTES.items() if route.method == "POST"}
    for path in posted - served:
        app.add_route(path, refuse, methods=["POST"], include_in_schema=False)


def add_description(app: FastAPI) -> None:
    """Add a route for the OpenAPI description of what the gateway serves."""

    @functools.cache
    def document() -> dict[str, Any]:
        return describe(app.openapi(), OFFERED)

    app.add_api_route(OPENAPI_PATH, document, include_in_schema=False)
