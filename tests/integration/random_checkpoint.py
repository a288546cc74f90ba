"""A checkpoint of a model that has learned nothing, with or without control tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write_checkpoint(
    directory: Path,
    special_tokens: tuple[str, ...] = (),
    boosted: Mapping[str, float] | None = None,
    *,
    context_tokens: int = 256,
    spread: float = 0.02,
    width: int = 64,
) -> Path:
    """A small random Llama whose tokenizer knows single bytes and the given special tokens.

    `boosted` tokens have logits that spread by this factor more than others, so that they are
    chosen now and then. `spread` is the standard deviation of the weights. `width` is a multiple of
    64.
    """
    tokenizer = _bytes_tokenizer(special_tokens)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(_text_config(tokenizer, context_tokens, spread, width))
    _boost(model, tokenizer, boosted or {})
    model.save_pretrained(directory)
    return directory


def write_encoder(directory: Path) -> Path:
    """A small random encoder, which vLLM serves as an embedding model."""
    from transformers import BertConfig, BertModel

    tokenizer = _bytes_tokenizer(())
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(directory)
    return directory


def write_image_checkpoint(
    directory: Path, special_tokens: tuple[str, ...], boosted: Mapping[str, float]
) -> Path:
    """A small random Idefics3, which reads an image as four tokens, with its processor.

    Of vLLM's models that read images, few can be imported without torchvision.
    """
    # Imported here: other tests need no images.
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    around = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    tokenizer = _bytes_tokenizer((*special_tokens, *around))
    edge = {"longest_edge": 56}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    vision = Idefics3VisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
    )
    end_id = tokenizer.eos_token_id
    ends: dict[str, Any] = {"eos_token_id": end_id, "bos_token_id": None, "pad_token_id": end_id}
    config = Idefics3Config(
        vision_config=vision.to_dict(),
        text_config=_text_config(tokenizer).to_dict(),
        image_token_id=tokenizer.get_vocab()["<image>"],
        scale_factor=2,
        **ends,
    )
    model = Idefics3ForConditionalGeneration(config)
    _boost(model, tokenizer, boosted)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            # Otherwise all images look the same.
            if "connector" in name or "vision" in name:
                weights.mul_(5)
    model.save_pretrained(directory)
    return directory


def _bytes_tokenizer(special_tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    return tokenizer


def _text_config(
    tokenizer: PreTrainedTokenizerFast,
    context_tokens: int = 256,
    spread: float = 0.02,
    width: int = 64,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=max(2, width // 64),
        max_position_embeddings=context_tokens,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=spread,
    )


def _boost(model: Any, tokenizer: PreTrainedTokenizerFast, factors: Mapping[str, float]) -> None:
    vocabulary = tokenizer.get_vocab()
    with torch.no_grad():
        for text, factor in factors.items():
            model.lm_head.weight[vocabulary[text]] *= factor
