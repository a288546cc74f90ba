"""The page on HPD-Parsing: its program and its command do what it says."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file
from vllm.model_executor.models.utils import AutoWeightsLoader

from apar_core.engine.async_engine import SCHEDULER_CLS
from apar_core.formats.resolved_format import shipped_format
from apar_core.vllm_names import FlexibleArgumentParser, make_arg_parser
from tests.fakes.quick_start import ROOT, blocks, program

PAGE = ("docs/hpd-parsing.md",)
TEXT = (ROOT / PAGE[0]).read_text(encoding="utf-8")


class SmallModel(torch.nn.Module):
    """The parts of a checkpoint that vLLM has a place for."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_model = torch.nn.Linear(2, 3)
        self.language_model = torch.nn.ModuleDict({"model": torch.nn.Linear(3, 4)})


def test_the_program_leaves_out_the_heads_which_vllm_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "HPD-Parsing"
    (source / "P-MTP").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    weights = {
        name: torch.rand(parameter.shape) for name, parameter in SmallModel().named_parameters()
    }
    heads = {f"language_model.mtp.{part}.weight": torch.rand(2, 2) for part in ("fc", "norm")}
    shards = [dict(list(weights.items())[:2]) | heads, dict(list(weights.items())[2:])]
    for number, shard in enumerate(shards):
        save_file(shard, source / f"model-{number}.safetensors", {"format": "pt"})

    monkeypatch.chdir(tmp_path)
    exec(program("import shutil", PAGE), {})

    written = tmp_path / "HPD-Parsing-forks"
    assert sorted(file.name for file in written.iterdir()) == [
        "config.json", "model-0.safetensors", "model-1.safetensors"
    ]  # fmt: skip
    kept = {
        name: tensor
        for file in sorted(written.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    assert kept.keys() == weights.keys()
    model = SmallModel()
    assert AutoWeightsLoader(model).load_weights(kept.items()) == weights.keys()
    assert all(torch.equal(weights[name], each) for name, each in model.named_parameters())
    with pytest.raises(ValueError, match=r"There is no module or parameter named 'language_.*mtp'"):
        AutoWeightsLoader(SmallModel()).load_weights([*weights.items(), *heads.items()])


def test_vllm_takes_the_command_and_the_format_is_known() -> None:
    [command] = [each for each in blocks("bash", PAGE) if each.startswith("vllm serve")]
    parser = make_arg_parser(FlexibleArgumentParser())

    args: Any = parser.parse_args(shlex.split(command.replace("\\\n", " "))[2:])

    assert args.scheduler_cls == SCHEDULER_CLS
    assert args.enable_prefix_caching
    assert args.limit_mm_per_prompt == {"image": 1}
    setting = json.loads(json.dumps(args.additional_config))["apar"]["parallel_format"]
    definition = shipped_format(setting)
    assert (definition.cut, definition.parent) == ("before", "continues")
    assert {definition.trigger, definition.child_seed, *definition.reserved} == {
        "<FORK>", "<CHILD>", "<BLOCK>"
    }  # fmt: skip


def vllms_functions() -> dict[str, Any]:
    """The functions of vLLM's InternVL processor, which cannot be imported without torchvision."""
    source = Path(vllm.__file__).parent / "transformers_utils" / "processors" / "internvl.py"
    functions: list[ast.stmt] = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and re.search("ratio|internvl_targets", node.name)
    ]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(functions, []), str(source), "exec"), names)
    return names


def test_the_grids_that_an_image_of_their_size_keeps_are_counted() -> None:
    internvl = vllms_functions()
    grids = internvl["get_internvl_target_ratios"](1, 25)

    changed = {}
    for grid in grids:
        width, height = 448 * grid[0], 448 * grid[1]
        _, *size = internvl["calculate_internvl_targets"](
            orig_width=width,
            orig_height=height,
            target_ratios=grids,
            image_size=448,
            use_thumbnail=True,
        )
        if size != [width, height]:
            changed[grid] = tuple(side // 448 for side in size)

    assert changed == {(3, 3): (4, 4), (4, 4): (5, 5)}
    assert f"for the {len(grids)} grids of up to 25 tiles" in TEXT
    assert "3 x 3 and 4 x 4, which become 4 x 4 and 5 x 5" in TEXT


def test_the_size_of_the_heads_is_counted() -> None:
    vocabulary, hidden, inner, num_bytes = 151_681, 1024, 3072, 2
    outside = 2 * vocabulary * hidden * num_bytes / 1e6
    layer = (2 * hidden * hidden + 3 * hidden * inner) * num_bytes / 1e6

    assert round(outside + layer) == 644
    numbers = re.findall(r"are (\d+) MB of it, and the\nlayer (\d+) MB", TEXT)
    assert numbers == [(str(round(outside)), str(round(layer)))]
