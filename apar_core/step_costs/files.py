"""Step costs in a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from apar_core.errors import StepCostsError
from apar_core.step_costs.costs import Kind, StepCosts

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_FORMAT = "apar step costs 1"


class _CostsFile(BaseModel):
    """The fields of `StepCosts`, in seconds, with the file's format."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["apar step costs 1"]
    name: str = Field(min_length=1)
    kind: Kind
    source: str
    matrix_s: tuple[tuple[PositiveInt, _Seconds], ...] = Field(min_length=1)
    attended_token_s: _Seconds
    launch_s: _Seconds = 0.0
    copied_block_s: _Seconds = 0.0
    row_s: _Seconds = 0.0
    host_base_s: _Seconds = 0.0
    host_row_s: _Seconds = 0.0
    largest_graph: PositiveInt | None = None
    eager_launch_s: _Seconds = 0.0
    repeated_token_s: _Seconds | None = None
    group_pass_s: _Seconds = 0.0
    group_s: _Seconds = 0.0
    grouped_row_s: _Seconds = 0.0


def write_costs(costs: StepCosts, path: Path) -> None:
    """Write step costs to a file that `read_costs` reads."""
    values = {name: getattr(costs, name) for name in _CostsFile.model_fields if name != "format"}
    lines = json.dumps({"format": _FORMAT, **values}, indent=1, allow_nan=False)
    path.write_text(lines + "\n", encoding="utf-8")


def read_costs(path: Path) -> StepCosts:
    """Read step costs from a file.

    Raises StepCostsError, naming the field and its value, for a file that is none of step costs.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StepCostsError(f"cannot read step costs from {path}: {error}") from error
    try:
        content = _CostsFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        problem = f"{field}: {message}, not {first['input']!r}" if field else message
        raise StepCostsError(f"{path} holds no step costs: {problem}") from error
    values = dict(content)
    del values["format"]
    try:
        return StepCosts(**values)
    except ValueError as error:
        raise StepCostsError(f"{path} holds no step costs: {error}") from error
