"""Pretrained models: load model and tokenizer, add a format's tokens, save a checkpoint."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from accelerate.utils import parse_flag_from_env  # type: ignore[import-untyped]
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.fsdp import is_fsdp_enabled

from apar_core.errors import TrainingError
from apar_core.file_modes import share_weights
from apar_core.formats.control_tokens import (
    SPELLINGS,
    ControlTokens,
    TreeTokens,
    find_control_tokens,
)
from apar_core.formats.resolved_format import find_format
from apar_core.formats.shipped_formats import APAR
from apar_core.offline.causal_model import load_causal_model
from apar_core.offline.training.chat_format import turn_end_id
from apar_core.offline.training.recipe import TrainingRecipe
from apar_core.offline.training.tree_forward import FLEX, SDPA, limited_attention

logger = logging.getLogger(__name__)
VICUNA_TEMPLATE = Path(__file__).with_name("vicuna_template.jinja")

# Share of the other rows' spread: enough to distinguish the tokens, otherwise negligible.
_NOISE_SHARE = 0.1


def check_model(name_or_path: str, context_length: int) -> None:
    """Raise TrainingError if the model cannot be trained on trees of `context_length` tokens.

    Only the configuration is read, not the weights.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise TrainingError(f"no model to train in {name_or_path!r}: {_line(error)}") from error
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and context_length > positions:
        raise TrainingError(
            f"context_length {context_length} exceeds the model's {positions} positions"
        )
    limited = limited_attention(config, context_length)
    if limited is not None:
        raise TrainingError(
            f"training on trees needs full attention in every layer; model {name_or_path!r} has "
            f"{limited}"
        )


def recipe_dtype(recipe: TrainingRecipe) -> torch.dtype:
    """Return the dtype in which weights are loaded and the forward pass runs."""
    return torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32


def is_sharded() -> bool:
    """Return whether `accelerate launch` is configured to shard the model with FSDP."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def load_model(name_or_path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model to a device, with FlexAttention on CUDA and SDPA elsewhere.

    With FSDP, the first process loads the model to CPU memory. The others create parameters on the
    meta device and receive their shards from the first. Raises TrainingError if there is no model.
    """
    attention = FLEX if device.type == "cuda" else SDPA
    sharded = is_fsdp_enabled()
    try:
        model: PreTrainedModel
        if sharded and torch.distributed.get_rank() != 0:
            config = AutoConfig.from_pretrained(name_or_path)
            with init_empty_weights():
                model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation=attention
                )
        else:
            model = load_causal_model(
                name_or_path,
                dtype=dtype,
                attn_implementation=attention,
                device_map=None if sharded else device,
            )
    except (OSError, ValueError) as error:
        raise TrainingError(f"no model to train in {name_or_path!r}: {_line(error)}") from error
    model.config.use_cache = False
    return model


def prepare_weights(model: PreTrainedModel | PeftModel) -> None:
    """Convert trained parameters to float32 master weights; frozen ones keep their dtype.

    accelerate distinguishes parameters by address, so those on the meta device get memory. It is
    never written, so the system does not commit it.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    # A sharded model has no adapters.
    if isinstance(model, PreTrainedModel) and any(part.is_meta for part in model.parameters()):
        model._apply(lambda part: torch.empty_like(part, device="cpu") if part.is_meta else part)
        model.tie_weights()


def load_tokenizer(name_or_path: str, chat_template: Path | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer; its chat template is that of the file, its own, or Vicuna's.

    Raises TrainingError if there is no tokenizer or the file cannot be read.
    """
    if name_or_path.startswith(("/", ".", "~")) and not Path(name_or_path).is_dir():
        raise TrainingError(f"no such model folder: {name_or_path}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise TrainingError(f"no tokenizer in {name_or_path!r}: {_line(error)}") from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TrainingError(f"chat template {chat_template} cannot be read: {error}") from error
    elif not tokenizer.chat_template:
        logger.warning("%r has no chat template: using and saving Vicuna's", name_or_path)
        tokenizer.chat_template = VICUNA_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a token id for padding, which is neither read nor learned."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


@dataclass(frozen=True, slots=True)
class FormatTokens:
    """Tokens that a format adds to a model.

    name: of the format. spellings: complete sets of tokens; the first one is added if the tokenizer
    has none. as_words: whether a new token begins as the mean of the tokens of the word in its
    brackets, as in ThreadWeaver (arXiv 2512.07843), instead of the mean of all tokens.
    """

    name: str
    spellings: tuple[tuple[str, ...], ...]
    as_words: bool = False

    def spelling(self, vocabulary: Mapping[str, int]) -> tuple[str, ...]:
        """Return the tokens that a vocabulary has or will get."""
        complete = (each for each in self.spellings if all(text in vocabulary for text in each))
        return next(complete, self.spellings[0])

    def ids(self, vocabulary: Mapping[str, int]) -> list[int]:
        """Return the ids of the tokens in a vocabulary that has them."""
        return [vocabulary[text] for text in self.spelling(vocabulary)]


CONTROL_TOKENS = FormatTokens(APAR.name, SPELLINGS)


def add_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: FormatTokens,
    *,
    multiple: int,
    seed: int,
) -> PreTrainedTokenizerBase:
    """Add a format's tokens to tokenizer and model unless they have them; return the tokenizer.

    Rows that exist are kept. A new row is the mean of the rows of its word, or the mean of all rows
    plus noise of a tenth of their spread. With the mean as output row, a new token starts about as
    likely as an average one, and the model's other predictions hardly change; a random row could
    win every argmax. The noise distinguishes the tokens. Raises TrainingError as `with_tokens`.
    """
    before = tokenizer.get_vocab()
    tokenizer = with_tokens(tokenizer, tokens)
    vocabulary = tokenizer.get_vocab()
    num_rows = len(_input_rows(model))
    new = {
        vocabulary[text]: _word_ids(text, tokenizer) if tokens.as_words else []
        for text in tokens.spelling(vocabulary)
        if text not in before or vocabulary[text] >= num_rows
    }
    if not new:
        return tokenizer
    _grow(model, max(len(tokenizer), *(token_id + 1 for token_id in new)), multiple)
    # A token that took the place of another has a row between used ones.
    taken = set(before.values())
    num_used = min([i for i in new if i not in taken or i >= num_rows], default=num_rows)
    _initialise_rows(model, new, min(num_used, num_rows), seed)
    logger.info("tokens added", extra={"format": tokens.name, "token_ids": sorted(new)})
    return tokenizer


def with_tokens(
    tokenizer: PreTrainedTokenizerBase, tokens: FormatTokens
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a format's tokens, as special tokens where they are new.

    A checkpoint has one format. So the tokens take the ids of APAR's control tokens if these are
    there. Raises TrainingError if the tokenizer has the tokens of another format, and
    CheckpointError if a control token lacks its partner.
    """
    vocabulary = tokenizer.get_vocab()
    missing = [text for text in tokens.spelling(vocabulary) if text not in vocabulary]
    if not missing:
        return tokenizer
    found = find_format(vocabulary)
    control = find_control_tokens(vocabulary)
    if control is not None:
        logger.warning("the tokens of format %r replace the model's control tokens", tokens.name)
        names = dict(zip((control.fork_text, control.child_text), missing, strict=False))
        tokenizer, missing = _renamed(tokenizer, names), missing[len(names) :]
    elif found is not None:
        raise TrainingError(
            f"the model has the tokens of format {found.definition.name!r}, and a checkpoint has "
            f"one format: train its base model for format {tokens.name!r}"
        )
    if missing:
        tokenizer.add_special_tokens(
            {"additional_special_tokens": missing}, replace_extra_special_tokens=False
        )
    lost = [text for text in missing if text not in tokenizer.get_vocab()]
    if lost:
        raise TrainingError(f"the tokenizer does not accept the tokens {lost}")
    return tokenizer


def _renamed(tokenizer: PreTrainedTokenizerBase, names: Mapping[str, str]) -> Any:
    """Return the tokenizer with other spellings of some tokens, which keep their ids."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {names.get(key, key): renamed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [renamed(inner) for inner in value]
        return names.get(value, value) if isinstance(value, str) else value

    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in Path(folder).glob("*.json"):
            path.write_text(json.dumps(renamed(json.loads(path.read_text("utf-8")))), "utf-8")
        return AutoTokenizer.from_pretrained(folder)


def _word_ids(marker: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(marker.strip("<>"), add_special_tokens=False)["input_ids"])


def _grow(model: PreTrainedModel, num_tokens: int, multiple: int) -> None:
    """Enlarge the embeddings if they have fewer rows."""
    if len(_input_rows(model)) < num_tokens:
        padded = math.ceil(num_tokens / multiple) * multiple
        model.resize_token_embeddings(padded, mean_resizing=False)


def _input_rows(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


@torch.no_grad()
def _initialise_rows(
    model: PreTrainedModel, new: Mapping[int, Sequence[int]], num_used: int, seed: int
) -> None:
    """Set the rows of new tokens, each to the mean of the given rows; none are all used ones.

    Rows from `num_used` on are new or padding.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = _input_rows(model)
    head = model.get_output_embeddings()
    matrices = [inputs]
    if head is not None and head.weight is not inputs:
        matrices.append(head.weight)
    bias_V = getattr(head, "bias", None)
    if bias_V is not None:
        old_V = bias_V[:num_used].float()
        bias_V[num_used:] = old_V.mean().to(bias_V.dtype)
        for token_id, words in new.items():
            bias_V[token_id] = (old_V[list(words)] if words else old_V).mean().to(bias_V.dtype)
    for matrix_VD in matrices:
        old_VD = matrix_VD[:num_used].float()
        mean_D, spread_D = old_VD.mean(0), old_VD.std(0)
        matrix_VD[num_used:] = mean_D.to(matrix_VD.dtype)
        for token_id in sorted(new):
            if words := list(new[token_id]):
                row_D = old_VD[words].mean(0)
            else:
                noise_D = torch.randn(mean_D.shape, generator=generator).to(mean_D)
                row_D = mean_D + _NOISE_SHARE * spread_D * noise_D
            matrix_VD[token_id] = row_D.to(matrix_VD.dtype)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer. Raises TrainingError if it has none."""
    control = find_control_tokens(tokenizer.get_vocab())
    if control is None:
        found = find_format(tokenizer.get_vocab())
        raise TrainingError(
            "the tokenizer has no control tokens: train the model with `apar train`"
            if found is None
            else f"the model has the tokens of format {found.definition.name!r}, but this needs a "
            "model with APAR's control tokens"
        )
    return control


def tree_tokens(tokenizer: PreTrainedTokenizerBase) -> TreeTokens:
    """Return the tree tokens of a tokenizer: control tokens and the end of an assistant's turn.

    Raises TrainingError if one of them is missing.
    """
    control = control_tokens(tokenizer)
    return TreeTokens(control.fork_id, control.child_id, turn_end_id(tokenizer))


def stop_at(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_id: int) -> None:
    """Add `end_id` to the stop tokens in the model's generation settings."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = {*configured} if isinstance(configured, list) else {configured}
    if model.generation_config is not None and end_id not in ids | {tokenizer.eos_token_id}:
        ids = {each for each in (*ids, tokenizer.eos_token_id, end_id) if each is not None}
        model.generation_config.eos_token_id = sorted(ids)


def save_pretrained(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Write weights (bfloat16), configuration, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    # Tied weights remain one tensor, so they are written once.
    cast: dict[int, Tensor] = {}
    for tensor in weights.values():
        cast.setdefault(tensor.data_ptr(), tensor.detach().to("cpu", torch.bfloat16))
    state = {name: cast[tensor.data_ptr()] for name, tensor in weights.items()}
    model.config.use_cache = True
    # transformers refuses to save settings that it takes for a mistake, such as a temperature
    # without `do_sample`. Published models have such settings, and a trained one must not be lost.
    settings = model.generation_config
    if settings is not None:
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.generation_config = settings
    if settings is not None:
        settings.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    share_weights(path)


def _line(error: Exception) -> str:
    lines = str(error).split("\n")
    # Some messages continue with a list after a colon.
    return " ".join(" ".join(lines).split()) if lines[0].rstrip().endswith(":") else lines[0]
