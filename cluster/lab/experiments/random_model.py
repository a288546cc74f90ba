"""Models of random weights, whose steps take as long as those of trained ones."""

import atexit
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from apar_core.step_costs.models import find_model


def write_random_model(name: str, folder: Path) -> Path:
    """Write a checkpoint folder without weights, for `load_format` "dummy", and return it.

    name: a model whose dimensions are known, or a config.json. The tokenizer is the stand-in for
    Llama's, with control tokens. Raises StepCostsError for an unknown model.
    """
    # Imports transformers, which takes seconds.
    from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text

    config = dict(find_model(name).config)
    text = load_text(LLAMA_TOKENIZER)
    text.tokenizer.save_pretrained(folder)
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    own = {
        "vocab_size": max(int(config["vocab_size"]), text.vocabulary_size),
        "bos_token_id": text.tokenizer.bos_token_id,
        "eos_token_id": text.end_id,
        # Prompts and answers of up to 2,048 tokens, and a margin.
        "max_position_embeddings": max(int(config.get("max_position_embeddings", 0)), 4096),
        "dtype": "bfloat16",
    }
    content = json.dumps({**llama, **config, **own}, indent=1)
    (folder / "config.json").write_text(content, encoding="utf-8")
    return folder


@cache
def random_model(name: str) -> Path:
    """Return a folder of `write_random_model`, which is removed when this process exits."""
    folder = TemporaryDirectory(prefix="apar-model-")
    atexit.register(folder.cleanup)
    return write_random_model(name, Path(folder.name))
