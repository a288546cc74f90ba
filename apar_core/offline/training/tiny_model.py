"""The embedded model as a transformers Llama, and its checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from apar_core.offline.training.tiny_settings import TinyModelSettings


def build_tiny_model(
    settings: TinyModelSettings, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Return a float32 model with weights drawn from torch's global generator."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_key_value_heads,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def save_checkpoint(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write the model in bfloat16 with its tokenizer and generation settings."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.config.use_cache = True
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
