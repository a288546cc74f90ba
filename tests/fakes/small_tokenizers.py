"""Small tokenizers of both types that checkpoints have."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL_TEXTS = ("[Fork]", "[Child]")


def byte_level_tokenizer(
    texts: Sequence[str] = CONTROL_TEXTS, *, special: bool = True
) -> PreTrainedTokenizerFast:
    """Tokenizer like Qwen's, with some texts as special or ordinary added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["For kids: [Forks] and [Children], then a fork"] * 5, trainer)
    return with_tokens(tokenizer, texts, special=special)


def sentencepiece_tokenizer(
    texts: Sequence[str] = CONTROL_TEXTS, *, special: bool = True, characters: str = "a"
) -> PreTrainedTokenizerFast:
    """Tokenizer like Llama's: a space before the first word, bytes for missing characters."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters, "▁["]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[("▁", "[")] if "[" in characters else [],
        byte_fallback=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return with_tokens(tokenizer, texts, special=special)


def with_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], *, special: bool
) -> PreTrainedTokenizerFast:
    if special:
        tokenizer.add_special_tokens(list(texts))
    else:
        tokenizer.add_tokens(list(texts))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
