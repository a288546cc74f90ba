"""`apar generate --decoder`: one answer by a decoder on transformers, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from apar_core.errors import RequestError
from apar_core.offline.data.records import ChatMessage
from cluster.cli.thread_view import statistics_line, thread_view
from cluster.config.model import DEFAULT_MODEL, ModelConfig

if TYPE_CHECKING:
    from apar_core.offline.decoders.interface import DecodedAnswer


@dataclass(frozen=True, slots=True)
class Asked:
    """What `apar generate` was asked for, under the names of its options."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int | None
    fork: bool
    raw: bool
    show_threads: bool


def generate_by_decoder(name: str, model: str, medusa_heads: Path | None, asked: Asked) -> None:
    """Print the text, or the threads that it was made of.

    Raises AparError for a model, heads or a prompt that the decoder cannot take.
    """
    # Torch takes seconds to import, and `apar --help` should not wait for it.
    from transformers.utils.logging import disable_progress_bar

    from apar_core.models.apar_tiny_medusa import heads_path
    from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice, decode_answer
    from apar_core.offline.decoders.load import DECODER_NAMES, load_decoder, load_tokenizer
    from apar_core.offline.evaluation.replay_text import ModelText

    disable_progress_bar()  # It would count tensors, faster than one can see.
    if medusa_heads is not None and (name != "medusa_apar" or not asked.fork):
        raise RequestError(
            f"medusa_heads {str(medusa_heads)!r}: only --decoder medusa_apar with forks has heads",
            param="medusa_heads",
        )
    # Without forks there is one thread, which is what plain decodes.
    name = "plain" if name in DECODER_NAMES and not asked.fork else name
    if medusa_heads is None and model == DEFAULT_MODEL:
        medusa_heads = heads_path()
    path = ModelConfig(checkpoint=model).preset.path
    tokenizer = load_tokenizer(path)
    text = ModelText(tokenizer, path)
    decoder = load_decoder(name, path, tokenizer, medusa_heads=medusa_heads)
    chat = [ChatMessage("user", asked.prompt)]
    answer = decode_answer(
        decoder,
        text.encode_prompt(asked.prompt) if asked.raw else text.encode_chat(chat),
        TokenChoice.sampled(asked.temperature, seed=asked.seed),
        DecodeLimits(max_tokens=asked.max_tokens),
    )
    console = Console()
    if asked.show_threads:
        _print_threads(console, name, answer, tokenizer)
        return
    console.print(
        str(tokenizer.decode(answer.text_ids)), markup=False, highlight=False, soft_wrap=True
    )


def _print_threads(console: Console, name: str, answer: DecodedAnswer, tokenizer: Any) -> None:
    from apar_core.tree.statistics import tree_statistics

    console.print(thread_view(answer.tree, lambda ids: str(tokenizer.decode(list(ids)))))
    statistics = tree_statistics(answer.tree, answer.num_prompt_tokens)
    console.print(statistics_line(statistics), highlight=False, soft_wrap=True)
    console.print(f"{name}: {len(answer.trace)} passes", highlight=False)
