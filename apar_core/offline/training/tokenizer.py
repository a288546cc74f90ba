"""The embedded model's tokenizer: byte-level BPE with control tokens and chat roles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
FORK, CHILD = "[Fork]", "[Child]"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, BOS, EOS, FORK, CHILD, *ROLES)

_CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(
    texts: Iterable[str], *, vocabulary_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most `vocabulary_size` entries, special tokens included.

    The same texts in the same order give the same tokenizer. Any text can be encoded (bytes are
    the alphabet), and decoding concatenated pieces gives their concatenated texts.
    """
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that "12 + 7" and the numbers of a list share their tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[FORK, CHILD, *ROLES],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=_CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )
