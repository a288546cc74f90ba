"""The model card of a conversion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from apar_core.checkpoint_folder import adapter_in
from cluster.conversion.stages import (
    CHATS,
    DATA,
    EVALUATION,
    MODEL,
    RECIPE_FILE,
    ConversionSettings,
    StageRecords,
)

_TEMPLATE = """\
# {name}

{base}, which learned to fork its answers (APAR, arXiv 2401.06761) by `apar convert` of apar-serve
{version} on {day}. The licence of {base} applies.

{weights}

```bash
apar serve {folder}
```

## Training data

{data}

## Training

`recipe.yaml` of the conversion:

```yaml
{recipe}
```

{times}

## Evaluation

{evaluation}
"""


def write_card(settings: ConversionSettings, out: Path, records: StageRecords) -> Path:
    """Write README.md beside the converted model; return its path."""
    folder = out / MODEL
    card = folder / "README.md"
    text = _TEMPLATE.format(
        name=out.resolve().name,
        base=settings.model,
        version=version("apar-serve"),
        day=f"{date.today():%Y-%m-%d}",
        folder=folder,
        weights=_weights(settings, folder),
        data=_data(settings, out),
        recipe=(out / RECIPE_FILE).read_text(encoding="utf-8").strip(),
        times=_times(records),
        evaluation=_evaluation(out),
    )
    card.write_text(text, encoding="utf-8")
    return card


def _weights(settings: ConversionSettings, folder: Path) -> str:
    if adapter_in(folder) is None:
        return (
            "The adapter that was trained is merged into the weights. Requests that may not fork "
            "end their answers early."
        )
    return (
        f"The weights are those of {settings.model}, with trained rows for the tokens of the "
        f"format `{settings.parallel_format}`. What forks is the adapter in `adapter/`, with which "
        "`apar serve` answers only requests that may fork."
    )


def _data(settings: ConversionSettings, out: Path) -> str:
    prepared = _read(out / DATA / "report.json")
    lines = []
    if settings.chats:
        lines.append(f"Chats of {', '.join(path.name for path in settings.chats)}.")
    else:
        chats = _read(out / CHATS / "report.json")
        source = "from a file" if settings.prompts else f"that {settings.model} asked itself"
        kept = chats.get("answers", {}).get("kept", 0)
        lines.append(f"The model's own answers to questions {source}: {kept} answers were kept.")
    lines.append(
        f"{prepared['structured']['written']} answers with forks (by the rules of the paper's "
        "appendix B, and at points without a colon) and "
        f"{prepared['unstructured']['written']} without; "
        f"{prepared['held_out']['written']} questions were held out."
    )
    return "\n".join(lines)


def _times(records: StageRecords) -> str:
    rows = [f"| {name} | {seconds / 60:.1f} |" for name, seconds in records.by_stage().items()]
    return "\n".join(["| Stage | Minutes |", "|---|--:|", *rows])


def _evaluation(out: Path) -> str:
    """Return the tables of the evaluation's report below the level of this heading."""
    report = (out / EVALUATION / "report.md").read_text(encoding="utf-8")
    _, _, tables = report.partition("### ")
    return f"### {tables.strip()}" if tables else report.strip()


def _read(file: Path) -> Mapping[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
