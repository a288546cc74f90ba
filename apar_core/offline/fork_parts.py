"""Parts that a base model needs to fork: an adapter and the rows of a few tokens.

`python -m apar_core.offline.fork_parts TRAINED PARTS` takes them out of a checkpoint of
`apar convert`; `join_parts` makes a checkpoint of them and the base model.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.checkpoint_folder import ADAPTER_CONFIG, ADAPTER_FOLDER
from apar_core.errors import CheckpointError
from apar_core.file_modes import share_weights
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.offline.gguf import ADDED_TOKEN, write_json

if TYPE_CHECKING:
    from torch import Tensor

ROWS_FILE = "rows.safetensors"
_ROWS = "rows"
_ADAPTER_FILE = "adapter_model.safetensors"
_WEIGHTS_FILE = "model.safetensors"
_EMBEDDING = "model.embed_tokens.weight"
_SEPARATE_HEAD = "lm_head.weight"
_TOKENIZER_FILE, _CONFIG_FILE = "tokenizer.json", "config.json"


def write_parts(trained: Path, parts: Path) -> None:
    """Write a converted checkpoint's adapter and rows, in bfloat16, to a folder.

    Raises CheckpointError if its adapter is merged, if it has no control tokens, or if it has rows
    of its own for output.
    """
    # Importing torch takes seconds.
    from safetensors.torch import load_file, save_file

    adapter = trained / ADAPTER_FOLDER
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{trained} has no adapter of its own: convert without --merge")
    tokens = _read_json(trained / _TOKENIZER_FILE)["added_tokens"]
    added = {each["content"]: each["id"] for each in tokens}
    if (control := find_control_tokens(added)) is None:
        raise CheckpointError(f"the tokenizer of {trained} has no control tokens")
    weights = _tied_weights(trained)
    rows = weights[_EMBEDDING][[control.fork_id, control.child_id]].bfloat16()
    (parts / ADAPTER_FOLDER).mkdir(parents=True, exist_ok=True)
    save_file(
        {_ROWS: rows},
        parts / ROWS_FILE,
        metadata={"tokens": json.dumps(list(control.texts.values()))},
    )
    tensors = load_file(adapter / _ADAPTER_FILE)
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()},
        parts / ADAPTER_FOLDER / _ADAPTER_FILE,
        metadata={"format": "pt"},
    )
    # The name is that of a folder on the machine that trained the adapter.
    config = _read_json(adapter / ADAPTER_CONFIG) | {"base_model_name_or_path": None}
    shared = parts / ADAPTER_FOLDER / ADAPTER_CONFIG
    write_json(shared, config)
    share_weights(shared)
    shutil.copymode(shared, parts / ROWS_FILE)


def join_parts(base: Path, parts: Path, out: Path) -> None:
    """Write the checkpoint that parts and their base model make to a new folder.

    The rows follow those of the base model. README.md comes from the parts, and the other files
    from the base model. Raises CheckpointError if the base model has rows of its own for output.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(parts / ROWS_FILE, framework="pt") as file:
        rows, tokens = file.get_tensor(_ROWS), json.loads(file.metadata()["tokens"])
    weights = _tied_weights(base)
    num_rows = len(weights[_EMBEDDING])
    weights[_EMBEDDING] = torch.cat([weights[_EMBEDDING], rows])
    shutil.copytree(base, out, ignore=shutil.ignore_patterns(_WEIGHTS_FILE))
    shutil.copytree(parts / ADAPTER_FOLDER, out / ADAPTER_FOLDER)
    shutil.copyfile(parts / "README.md", out / "README.md")
    save_file(weights, out / _WEIGHTS_FILE, metadata={"format": "pt"})
    tokenizer, config = _read_json(base / _TOKENIZER_FILE), _read_json(base / _CONFIG_FILE)
    tokenizer["added_tokens"] += [
        {"id": num_rows + index, "content": token, **ADDED_TOKEN}
        for index, token in enumerate(tokens)
    ]
    write_json(out / _TOKENIZER_FILE, tokenizer)
    write_json(out / _CONFIG_FILE, config | {"vocab_size": num_rows + len(tokens)})
    for shared in (out / _CONFIG_FILE, out / ADAPTER_FOLDER / ADAPTER_CONFIG):
        share_weights(shared)


def _tied_weights(checkpoint: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = load_file(checkpoint / _WEIGHTS_FILE)
    if _SEPARATE_HEAD in weights:
        raise CheckpointError(
            f"{checkpoint} has {_SEPARATE_HEAD}: parts have rows for input and output alike"
        )
    return weights


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    write_parts(Path(sys.argv[1]), Path(sys.argv[2]))
