"""Engine arguments as vLLM's server takes them, and its application as a replica takes it."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from apar_core.errors import CheckpointError
from apar_core.vllm_names import build_app
from deployments.replica.engine_factory import remove_unused_middleware, server_arguments


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
