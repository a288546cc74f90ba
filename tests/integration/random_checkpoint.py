"""A checkpoint of a model that has learned nothing, with or without control tokens."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write_checkpoint(
    directory: Path,
    special_tokens: tuple[str, ...] = (),
    boosted: Mapping[str, float] | None = None,
) -> Path:
    """A small random Llama whose tokenizer knows single bytes and the given special tokens.

    `boosted` tokens have logits that spread by this factor more than others, so that they are
    chosen now and then.
    """
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
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    vocabulary = tokenizer.get_vocab()
    with torch.no_grad():
        for text, factor in (boosted or {}).items():
            model.lm_head.weight[vocabulary[text]] *= factor
    model.save_pretrained(directory)
    return directory
