"""Inspect a checkpoint's files without loading its weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from apar_core.errors import CheckpointError
from apar_core.formats.control_tokens import (
    ControlTokens,
    Markers,
)
from apar_core.formats.parallel_format import ParallelFormat
from apar_core.formats.resolved_format import (
    FoundFormat,
    ResolvedFormat,
    find_format,
    refused_format,
    resolve,
)
from apar_core.vllm_names import get_config, get_hf_text_config, get_tokenizer

_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """Facts about a checkpoint.

    num_parameters, weights_bytes: None if the weights are not on this machine; the first also if
        they are not in safetensors format.
    vocabulary_size, num_embeddings: entries of the tokenizer, and rows of the model's embedding.
    found: format of parallel text, and how it was found; None for an ordinary model.
    refused: name of a format that this package cannot serve, whose tokens the checkpoint has.
    """

    name_or_path: str
    architecture: str
    model_type: str
    dtype: str
    num_parameters: int | None
    weights_bytes: int | None
    max_positions: int
    vocabulary_size: int
    num_embeddings: int
    found: FoundFormat | None
    resolved: ResolvedFormat | None
    refused: str | None

    @property
    def control_tokens(self) -> ControlTokens | None:
        """Fork and child token; None if the checkpoint has no such pair."""
        return None if self.resolved is None else self.resolved.control_tokens


def inspect_checkpoint(
    name_or_path: str, setting: ParallelFormat | None = None
) -> CheckpointReport:
    """Read configuration and tokenizer of a directory or a model on the Hugging Face hub.

    `setting` is the format in the model's configuration. Raises CheckpointError if the files cannot
    be read, if the tokens of the format are incomplete or fit several formats, or if one has no
    embedding.
    """
    config = _load_config(name_or_path)
    tokenizer = _load_tokenizer(name_or_path)
    text_config = get_hf_text_config(config)
    vocabulary = tokenizer.get_vocab()
    found = find_format(vocabulary, setting)
    resolved = None if found is None else resolve(found.definition, tokenizer)
    if resolved is not None:
        _check_embeddings(resolved, text_config.vocab_size)
    weights = weight_files(name_or_path)
    return CheckpointReport(
        name_or_path=name_or_path,
        architecture=", ".join(config.architectures or ["unknown"]),
        model_type=config.model_type,
        dtype=str(text_config.dtype).removeprefix("torch."),
        num_parameters=_num_parameters(weights),
        weights_bytes=sum(file.stat().st_size for file in weights) if weights else None,
        max_positions=text_config.max_position_embeddings,
        vocabulary_size=len(vocabulary),
        num_embeddings=text_config.vocab_size,
        found=found,
        resolved=resolved,
        refused=refused_format(vocabulary),
    )


def _load_config(name_or_path: str) -> Any:
    try:
        return get_config(name_or_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no model configuration in {name_or_path!r}: {error}") from error


def _load_tokenizer(name_or_path: str) -> Any:
    try:
        return get_tokenizer(name_or_path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no tokenizer in {name_or_path!r}: {error}") from error


def _check_embeddings(control_tokens: Markers, num_embeddings: int) -> None:
    for token_id, text in control_tokens.texts.items():
        if token_id >= num_embeddings:
            raise CheckpointError(
                f"control token {text!r} has id {token_id}, but the model has only "
                f"{num_embeddings} embeddings"
            )


def weight_files(name_or_path: str) -> list[Path]:
    """Return the checkpoint's weight files on this machine, without asking the hub."""
    directory = Path(name_or_path)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(name_or_path, local_files_only=True))
        except OSError:
            return []
    safetensors = sorted(directory.glob("*.safetensors"))
    return safetensors or sorted(directory.glob("pytorch_model*.bin"))


def _num_parameters(weights: Iterable[Path]) -> int | None:
    """Return the elements of all tensors, from the headers of safetensors files."""
    num_parameters = 0
    for file in weights:
        if file.suffix != ".safetensors":
            return None
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            header = json.loads(stream.read(length))
        tensors = (entry for name, entry in header.items() if name != "__metadata__")
        num_parameters += sum(prod(tensor["shape"]) for tensor in tensors)
    return num_parameters or None
