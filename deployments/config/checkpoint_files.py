"""Checks on the files of a checkpoint or adapter, before an engine starts on them.

They need no library of models, so that a wrong name or a broken file ends `apar serve` at once.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apar_core.checkpoint_folder import ADAPTER_CONFIG
from apar_core.suggestions import did_you_mean
from deployments.config.files import ConfigError

# A name that resembles a preset is refused, though the hub might have it.
_SURE = 0.75
_HEADER_LENGTH_BYTES = 8
# Larger headers are refused by the safetensors library.
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
# Mistral's own checkpoints have the second one.
_CONFIGURATIONS = ("config.json", "params.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_INDEX = "model.safetensors.index.json"
# Source: `validate_repo_id` of huggingface_hub.
_HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+", re.ASCII)
# Object storage, from which vLLM streams weights (`load_format: runai_streamer`).
_STORED = ("s3://", "gs://", "az://")


def check_name(name: str, presets: Sequence[str]) -> None:
    """Raise ConfigError if a name is no folder, preset, object storage or possible name on the hub.

    A name that resembles a preset is refused with a suggestion, and so is the path of a folder that
    does not exist: neither is looked up on the hub.
    """
    path = Path(name).expanduser()
    if name in presets or path.is_dir() or name.startswith(_STORED):
        return
    if path.is_file():
        raise ConfigError(f"{name} is a file; give the folder that contains it")
    if name.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"no such folder: {name}{_similar_folder(path)}")
    if "/" not in name and (similar := did_you_mean(name, presets, cutoff=_SURE)):
        raise ConfigError(
            f"{name} is neither a preset nor a folder; presets: {', '.join(presets)}{similar}"
        )


def _similar_folder(path: Path) -> str:
    try:
        folders = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    return did_you_mean(path.name, folders, folder=path.parent, cutoff=_SURE)


def check_checkpoint_folder(
    folder: Path, *, has_configuration: bool = True, has_weights: bool = True
) -> None:
    """Raise ConfigError if a folder has no configuration, or no weights that are complete.

    `has_configuration` and `has_weights` are False for an engine that reads them from elsewhere.
    """
    found = [folder / name for name in _CONFIGURATIONS if (folder / name).is_file()]
    if has_configuration and not found:
        raise ConfigError(f"{folder} is no checkpoint: it has no config.json{_inner(folder)}")
    for file in found:
        _read_object(file)
    if has_weights:
        _check_weights(folder)


def check_adapter_folder(folder: Path) -> None:
    """Raise ConfigError if a folder is no LoRA adapter, or its weights are incomplete."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise ConfigError(f"{folder} is no LoRA adapter: it has no {ADAPTER_CONFIG}")
    _read_object(file)
    _check_weights(folder)


def _inner(folder: Path) -> str:
    """Name the last checkpoint in a folder, for example of a training run."""
    inner = [file.parent for file in folder.glob("*/config.json")]
    latest = max(inner, key=lambda path: path.stat().st_mtime, default=None)
    return "" if latest is None else f"; did you mean {latest}?"


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}{_AGAIN}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object{_AGAIN}")
    return content


_AGAIN = "; copy or download the checkpoint again"


def _check_weights(folder: Path) -> None:
    index = folder / _INDEX
    try:
        files = _read_object(index).get("weight_map", {}).values() if index.is_file() else ()
        missing = sorted({name for name in files if not (folder / name).is_file()})
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"{index} does not map tensors to files{_AGAIN}") from error
    if missing:
        raise ConfigError(f"{folder} lacks {missing[0]}, which {_INDEX} names{_AGAIN}")
    if not any(file.is_file() for pattern in _WEIGHTS for file in folder.glob(pattern)):
        raise ConfigError(f"{folder} has no weights: there is no *.safetensors file in it{_AGAIN}")
    for file in sorted(folder.glob("*.safetensors")):
        check_safetensors(file)


def check_safetensors(file: Path) -> None:
    """Raise ConfigError if a safetensors file is shorter or longer than its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(_HEADER_LENGTH_BYTES)
            if start == _LFS_POINTER[:_HEADER_LENGTH_BYTES]:
                raise ConfigError(
                    f"{file} is a pointer of Git LFS, not the weights; run `git lfs pull` in "
                    f"{file.parent}"
                )
            length = int.from_bytes(start, "little")
            header = json.loads(stream.read(min(length, _MAX_HEADER_BYTES)))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        ends = [entry["data_offsets"][1] for entry in tensors]
        expected = _HEADER_LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        raise ConfigError(f"{file} is not a complete safetensors file{_AGAIN}") from error
    if size != expected:
        raise ConfigError(f"{file} has {size:,} bytes instead of {expected:,}{_AGAIN}")
