"""vLLM's medusa module and ours on the same file: the same logits in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.models.medusa import Medusa
from vllm.transformers_utils.configs.medusa import MedusaConfig

from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.offline.speculation.medusa_heads import (
    MedusaHeads,
    MedusaHeadSettings,
    load_medusa_heads,
    save_medusa_heads,
)


@pytest.fixture
def one_process() -> Iterator[VllmConfig]:
    """What vLLM's vocabulary layers ask for: a configuration and groups of one process."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method="tcp://127.0.0.1:0",
            backend="gloo",
        )
        parallel_state.initialize_model_parallel()
        try:
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def vllm_logits(folder: Path, hidden_TD: torch.Tensor) -> torch.Tensor:
    config: Any = MedusaConfig.from_pretrained(folder)
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    vllm_config: Any = SimpleNamespace(speculative_config=speculative)
    module = Medusa(vllm_config=vllm_config).float()
    weights = load_file(folder / "model.safetensors")
    loaded = module.load_weights(weights.items())
    assert loaded == set(dict(module.named_parameters()))
    for lm_head in module.lm_heads:
        lm_head.quant_method.process_weights_after_loading(lm_head)
    with torch.inference_mode():
        return torch.stack(module.compute_logits(module(hidden_TD)))


@pytest.mark.parametrize("layers", [None, 1, 3])
def test_our_heads_compute_what_vllms_module_does(
    tmp_path: Path, one_process: VllmConfig, layers: int | None
) -> None:
    torch.manual_seed(0)
    if layers is None:
        folder = SHIPPED_HEADS["apar-tiny"]
    else:
        folder = tmp_path
        settings = MedusaHeadSettings(
            hidden_size=32, vocab_size=128, medusa_num_heads=3, medusa_num_layers=layers
        )
        save_medusa_heads(MedusaHeads(settings), folder)
    heads = load_medusa_heads(folder).float()
    hidden_TD = torch.randn(17, heads.settings.hidden_size)

    with torch.inference_mode():
        ours = heads(hidden_TD)

    theirs = vllm_logits(folder, hidden_TD)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
