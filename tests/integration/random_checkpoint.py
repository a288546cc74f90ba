"""A checkpoint of a model that has learned nothing, with or without control tokens."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write_checkpoint(
    directory: Path,
    special_tokens: tuple[str, ...] = (),
    *,
    context_tokens: int = 256,
    spread: float = 0.02,
) -> Path:
    """A small random Llama whose tokenizer knows single bytes and the given special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context_tokens,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=spread,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
