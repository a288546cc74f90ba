"""A model of given dimensions with random weights, for replay: its speed is that of a trained one.

In replay the choice of every token is forced, so that weights decide nothing but time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from apar_core.errors import EvaluationError


@dataclass(frozen=True, slots=True)
class _Dimensions:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int


_DIMENSIONS = {
    "tiny": _Dimensions(hidden=64, intermediate=160, layers=2, heads=4, positions=8192),
    # LLaMA (arXiv 2302.13971), table 2, with room for long replays.
    "llama-7b": _Dimensions(hidden=4096, intermediate=11008, layers=32, heads=32, positions=4096),
    "llama-13b": _Dimensions(hidden=5120, intermediate=13824, layers=40, heads=40, positions=4096),
}
PRESETS = tuple(_DIMENSIONS)


def random_model(
    preset_or_config: str, *, vocabulary_size: int, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Return an untrained causal language model on its device, ready to decode.

    Its vocabulary has at least `vocabulary_size` entries. Raises EvaluationError for a name that
    is neither a preset nor a configuration file (or its folder) of transformers.
    """
    config = _config(preset_or_config)
    config.vocab_size = max(vocabulary_size, getattr(config, "vocab_size", 0))
    # Drawn where they will stay: 7 billion weights take minutes on a CPU.
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()  # type: ignore[no-any-return]


def _config(preset_or_config: str) -> PretrainedConfig:
    if preset_or_config in _DIMENSIONS:
        dimensions = _DIMENSIONS[preset_or_config]
        return LlamaConfig(
            vocab_size=1,
            # Ids that LlamaConfig would otherwise check against one entry.
            bos_token_id=None,
            eos_token_id=None,
            hidden_size=dimensions.hidden,
            intermediate_size=dimensions.intermediate,
            num_hidden_layers=dimensions.layers,
            num_attention_heads=dimensions.heads,
            num_key_value_heads=dimensions.heads,
            max_position_embeddings=dimensions.positions,
        )
    if not Path(preset_or_config).exists():
        raise EvaluationError(
            f"{preset_or_config!r} is neither {', '.join(PRESETS)} nor a configuration file"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(preset_or_config)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{preset_or_config}: {str(error).splitlines()[0]}") from error
    return config
