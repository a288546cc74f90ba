"""Engine arguments as vLLM's server takes them, and its application as a replica takes it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from jinja2 import Template
from vllm.renderers.chat_utils import load_chat_template

from apar_core.errors import CheckpointError
from apar_core.vllm_names import build_app
from deployments.config.model import ModelConfig
from deployments.replica.apar_extension import Parsers
from deployments.replica.engine_factory import (
    parsers_of,
    refuse_unreadable_bodies,
    remove_unused_middleware,
    server_arguments,
)


def write_adapter(folder: Path, rank: int) -> dict[str, str]:
    folder.mkdir()
    config = {"r": rank, "rank_pattern": {"lm_head": 2}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return {"name": folder.name, "path": str(folder)}


@pytest.mark.parametrize(("ranks", "allocated"), [((4,), 8), ((4, 20), 32)])
def test_memory_is_allocated_for_the_largest_rank(
    tmp_path: Path, ranks: tuple[int, ...], allocated: int
) -> None:
    adapters = [write_adapter(tmp_path / f"a{rank}", rank) for rank in ranks]

    args = server_arguments("m", "n", {"lora_modules": adapters})

    assert args.max_lora_rank == allocated
    assert [module.name for module in args.lora_modules] == [each["name"] for each in adapters]
    given = server_arguments("m", "n", {"lora_modules": adapters, "max_lora_rank": 64})
    assert given.max_lora_rank == 64
    remote = [*adapters, {"name": "x", "path": "someone/adapter"}]
    assert server_arguments("m", "n", {"lora_modules": remote}).max_lora_rank == 16


def test_a_mapping_becomes_what_vllms_command_line_makes_of_it() -> None:
    args = server_arguments("m", "n", {"structured_outputs_config": {"backend": "xgrammar"}})

    assert args.structured_outputs_config.backend == "xgrammar"
    with pytest.raises(CheckpointError, match="'structured_outputs_config'"):
        server_arguments("m", "n", {"structured_outputs_config": {"backend": "none"}})


def test_pieces_of_an_answer_pass_no_middleware_that_does_nothing_for_the_gateway() -> None:
    def names(app: FastAPI) -> list[str]:
        found: list[str] = []
        each: Any = app.middleware_stack or app.build_middleware_stack()
        while hasattr(each, "app"):
            found.append(type(each).__name__)
            each = each.app
        return found

    app = build_app(server_arguments("m", "n", {}), ("generate",), None)
    before = names(app)
    unused = {"CORSMiddleware", "PrometheusInstrumentatorMiddleware"}
    assert unused < set(before)

    remove_unused_middleware(app)

    assert names(app) == [name for name in before if name not in unused]


@pytest.mark.parametrize(
    ("engine", "parsers", "calls_by_default"),
    [
        ({}, Parsers(tools=False, reasoning=False), False),
        ({"tool_call_parser": "hermes"}, Parsers(tools=True, reasoning=False), True),
        (
            {"tool_call_parser": "hermes", "enable_auto_tool_choice": False},
            Parsers(tools=True, reasoning=False),
            False,
        ),
        ({"reasoning_parser": "qwen3"}, Parsers(tools=False, reasoning=True), False),
        (
            {"structured_outputs_config": {"reasoning_parser": "qwen3"}},
            Parsers(tools=False, reasoning=True),
            False,
        ),
    ],
)
def test_a_parser_of_tool_calls_is_enough_for_tools(
    engine: dict[str, Any], parsers: Parsers, calls_by_default: bool
) -> None:
    args = server_arguments("m", "n", engine)

    assert parsers_of(args) == parsers
    assert args.enable_auto_tool_choice is calls_by_default


async def test_a_body_that_vllms_checks_fail_on_is_the_clients_error() -> None:
    app = build_app(server_arguments("m", "n", {}), ("generate",), None)
    # vLLM's handlers of errors look for these.
    app.state.args = server_arguments("m", "n", {})
    app.state.server = app.state.engine_client = None
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi", "structured_outputs": []},
        "/v1/chat/completions": {"messages": [], "structured_outputs": "x"},
        "/v1/responses": {"input": "hi", "tools": 1.5},
    }

    refuse_unreadable_bodies(app)

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as http:
        answers = [await http.post(path, json=body) for path, body in bodies.items()]
    for answer in answers:
        assert answer.status_code == 400
        assert "cannot be read" in answer.json()["error"]["message"]


@pytest.mark.parametrize("checkpoint", ["apar-7b", "apar-13b"])
def test_the_released_checkpoints_have_vicuna_s_chat_template(checkpoint: str) -> None:
    arguments = server_arguments(
        checkpoint, checkpoint, ModelConfig(checkpoint=checkpoint).preset.engine
    )

    template = load_chat_template(arguments.chat_template)
    text = Template(template or "").render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True, bos_token="<s>"
    )
    assert text.startswith("<s> A chat between a curious user")
    assert text.endswith("USER: Hi ASSISTANT:")


@pytest.mark.parametrize(
    ("value", "length"),
    [("2k", 2000), ("2K", 2048), (2048, 2048), (2e3, 2000), ("auto", -1), (None, None)],
)
def test_values_are_read_as_on_vllm_s_command_line(value: Any, length: int | None) -> None:
    assert server_arguments("m", "n", {"max_model_len": value}).max_model_len == length
