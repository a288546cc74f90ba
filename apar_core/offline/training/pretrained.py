"""Pretrained models: load model and tokenizer, add control tokens, save a servable checkpoint."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from accelerate.utils import parse_flag_from_env  # type: ignore[import-untyped]
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
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
from apar_core.offline.causal_model import load_causal_model
from apar_core.offline.training.chat_format import turn_end_id
from apar_core.offline.training.recipe import TrainingRecipe
from apar_core.offline.training.tree_forward import FLEX, SDPA, limited_attention

logger = logging.getLogger(__name__)
VICUNA_TEMPLATE = Path(__file__).with_name("vicuna_template.jinja")

# Share of the other rows' spread: enough to distinguish the two tokens, otherwise negligible.
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


def add_control_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, multiple: int, seed: int
) -> ControlTokens:
    """Add the control tokens to tokenizer and model unless they have them; return the tokens.

    A new row is the mean of all rows plus noise of a tenth of their spread. With the mean as output
    row, a new token starts about as likely as an average one, and the model's other predictions
    hardly change; a random row could win every argmax. The noise distinguishes the two tokens.
    """
    are_new = find_control_tokens(tokenizer.get_vocab()) is None
    control = with_control_tokens(tokenizer)
    if are_new:
        _grow(model, len(tokenizer), multiple)
        _initialise_rows(model, control, seed)
        extra = {"fork": control.fork_id, "child": control.child_id}
        logger.info("control tokens added", extra=extra)
    elif _grow(model, max(control.fork_id, control.child_id) + 1, multiple):
        _initialise_rows(model, control, seed)
    return control


def with_control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Add the control tokens to a tokenizer unless it has them; return the tokens."""
    known = find_control_tokens(tokenizer.get_vocab())
    if known is not None:
        return known
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(SPELLINGS[0])}, replace_extra_special_tokens=False
    )
    known = find_control_tokens(tokenizer.get_vocab())
    if known is None:
        raise TrainingError(f"the tokenizer does not accept the tokens {SPELLINGS[0]}")
    return known


def _grow(model: PreTrainedModel, num_tokens: int, multiple: int) -> bool:
    """Enlarge the embeddings if they have fewer rows; return whether they grew."""
    if len(_input_rows(model)) >= num_tokens:
        return False
    padded = math.ceil(num_tokens / multiple) * multiple
    model.resize_token_embeddings(padded, mean_resizing=False)
    return True


def _input_rows(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


@torch.no_grad()
def _initialise_rows(model: PreTrainedModel, control: ControlTokens, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new = {control.fork_id, control.child_id}
    inputs = _input_rows(model)
    head = model.get_output_embeddings()
    matrices = [inputs]
    if head is not None and head.weight is not inputs:
        matrices.append(head.weight)
        bias = getattr(head, "bias", None)
        if bias is not None:
            bias[sorted(new)] = bias[: min(new)].mean()
    for matrix_VD in matrices:
        # All rows from the first new one are new or padding.
        old_VD = matrix_VD[: min(new)].float()
        mean_D, spread_D = old_VD.mean(0), old_VD.std(0)
        matrix_VD[min(new) :] = mean_D.to(matrix_VD.dtype)
        for token_id in sorted(new):
            noise_D = torch.randn(mean_D.shape, generator=generator).to(mean_D)
            row_D = mean_D + _NOISE_SHARE * spread_D * noise_D
            matrix_VD[token_id] = row_D.to(matrix_VD.dtype)


def tree_tokens(tokenizer: PreTrainedTokenizerBase) -> TreeTokens:
    """Return the tree tokens of a tokenizer: control tokens and the end of an assistant's turn.

    Raises TrainingError if one of them is missing.
    """
    control = find_control_tokens(tokenizer.get_vocab())
    if control is None:
        raise TrainingError(
            "the tokenizer has no control tokens: train the model with `apar train`"
        )
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
    model.save_pretrained(folder, state_dict=state)
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
