"""Builds the engine of a replica, and vLLM's HTTP application over it."""

import functools
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import Any, cast

from fastapi import FastAPI
from vllm import AsyncEngineArgs, envs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from apar_core.engine.async_engine import SCHEDULER_CLS, AparAsyncLLM
from apar_core.errors import CheckpointError
from deployments.replica.openapi import OFFERED, described
from deployments.replica.openapi import PATH as DESCRIPTION_PATH

_SERVE_LOGGER = "ray.serve"


@contextmanager
def kept_serve_logs() -> Iterator[None]:
    """Give Ray Serve's log handlers back what they lose within.

    vLLM configures logging when it is imported, and again when an engine's configuration is made.
    Each time that closes every handler of the process and takes the file from Ray Serve's. A
    controller that has been restarted asks each replica for that file, and would give up the
    replicas, although they serve.
    """
    targets = [
        (handler, handler.target)
        for handler in logging.getLogger(_SERVE_LOGGER).handlers
        if isinstance(handler, MemoryHandler)
    ]
    try:
        yield
    finally:
        for handler, target in targets:
            handler.setTarget(target)


def server_arguments(model: str, served_name: str, engine: Mapping[str, Any]) -> Namespace:
    """vLLM's server arguments with its own defaults, but for ours and the given engine ones.

    Raises CheckpointError for an engine argument that vLLM does not know.
    """
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
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
            raise CheckpointError(f"vLLM has no engine argument {name!r}")
        setattr(args, name, value)
    return args


def build_engine(args: Namespace, stat_loggers: Sequence[Any] = ()) -> AparAsyncLLM:
    """The engine; starts its process. Must run inside the event loop that will use it.

    `stat_loggers` are told vLLM's statistics, beside its own log.
    """
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
    engine = AparAsyncLLM.from_vllm_config(
        config, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=list(stat_loggers)
    )
    return cast(AparAsyncLLM, engine)


async def build_http_application(engine: EngineClient, args: Namespace) -> FastAPI:
    """vLLM's OpenAI server over the engine, to be run in process."""
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    # The engine process does the same: reading the environment at every step costs time.
    envs.enable_envs_cache()
    add_description(app)
    app.state.server = Namespace()  # vLLM's error handler looks for its uvicorn server here.
    return app


def add_description(app: FastAPI) -> None:
    """Let the application describe itself, as the gateway offers it."""

    @functools.cache
    def document() -> dict[str, Any]:
        return described(app.openapi(), OFFERED)

    app.add_api_route(DESCRIPTION_PATH, document, include_in_schema=False)
