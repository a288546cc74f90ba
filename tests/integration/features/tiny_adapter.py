"""An APAR adapter for a model that does not fork: trained, and merged by hand."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.formats.control_tokens import find_control_tokens
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.training.fine_tune import fine_tune
from apar_core.offline.training.recipe import LoraSettings, TrainingRecipe
from tests.fakes.example_files import write_examples

LORA = LoraSettings(rank=4, alpha=8, merge=False)
RECIPE = TrainingRecipe(
    batch_size=4, micro_batch_size=2, num_steps=30, learning_rate=2e-2, dtype="float32",
    context_length=768, validation_share=0.0, vocabulary_multiple=8, lora=LORA,
)  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """Folders of a base model, of its adapter, and of both merged in float32."""

    base: Path
    adapter: Path
    merged: Path


def train_adapter(folder: Path) -> Adapter:
    """Train in about 12 s; only with the adapter does the model know when to fork."""
    data, out = folder / "data", folder / "out"
    data.mkdir()
    examples = enumerate(Corpus(seed=3).examples(40))
    write_examples(
        data / "structured.jsonl",
        (replace(example, example_id=str(number)) for number, example in examples),
    )
    fine_tune(str(_forgetful(folder / "forgetful")), data, out, RECIPE)
    return Adapter(out, out / "adapter", _merged(out, folder / "merged"))


def _forgetful(folder: Path) -> Path:
    """Save apar-tiny with meaningless embeddings of its control tokens."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    control = find_control_tokens(tokenizer.get_vocab())
    assert control is not None
    generator = torch.Generator().manual_seed(0)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    with torch.no_grad():
        for token_id in (control.fork_id, control.child_id):
            noise = torch.randn(weight.shape[1], generator=generator)
            weight[token_id] = weight.mean(0) + 0.1 * weight.std(0) * noise
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _merged(base: Path, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    factors = load_file(base / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, first in factors.items():
            if ".lora_A." in name:
                weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
                change = factors[name.replace("lora_A", "lora_B")] @ first
                model.get_parameter(weight).add_(LORA.alpha / LORA.rank * change)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder
