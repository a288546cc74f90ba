"""What the settings of experiments, simulations and plans have in common: models on GPUs, files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict

from apar_core.attention.settings import FamilySettings
from apar_core.errors import StepCostsError
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import ModelSize, find_model
from apar_core.step_costs.predict import kv_tokens, step_costs


class Settings(BaseModel):
    """Settings of one command; the docstrings of its fields are the help of its options.

    points: fields in which the runs of one folder may differ.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    points: ClassVar[frozenset[str]] = frozenset()

    def as_text(self) -> dict[str, str]:
        """Return the settings that all runs of a folder share, with traces by their content."""
        values = self.model_dump(mode="json", exclude={"trace", *self.points})
        if "trace" in type(self).model_fields:
            trace: Path | None = self.trace  # type: ignore[attr-defined]
            values["trace_sha256"] = "built in" if trace is None else file_digest(trace)
        return {name: str(value) for name, value in values.items()}


def _gpu_name(name: str) -> str:
    try:
        return find_gpu(name).name
    except StepCostsError as error:
        raise ValueError(str(error)) from error


def known_model(name: str) -> str:
    """Return a model's name. Raises ValueError for a model whose dimensions are unknown."""
    try:
        find_model(name)
    except StepCostsError as error:
        raise ValueError(str(error)) from error
    return name


GpuName = Annotated[str, AfterValidator(_gpu_name)]
"""Full name of a GPU; short names are accepted."""
GpuNames = Annotated[tuple[GpuName, ...], AfterValidator(lambda names: tuple(dict.fromkeys(names)))]
"""Full names of GPUs, each once."""
KnownModel = Annotated[str, AfterValidator(known_model)]
"""A model whose dimensions are known: a name, a checkpoint folder or a config.json."""


@dataclass(frozen=True)
class ModelOnGpu:
    """A model on a GPU, or on several, and what predictions assume of them."""

    model: str
    gpu: str
    tensor_parallel: int = 1
    block_size: int = 16

    @cached_property
    def size(self) -> ModelSize:
        """The model's dimensions."""
        return find_model(self.model)

    @cached_property
    def costs(self) -> StepCosts:
        """Predicted step costs."""
        return step_costs(self.size, find_gpu(self.gpu), self.tensor_parallel, self.block_size)

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens of the whole KV cache."""
        gpu = find_gpu(self.gpu)
        return kv_tokens(self.size, gpu, self.tensor_parallel, block_size=self.block_size)

    @property
    def family(self) -> FamilySettings:
        """Settings of family attention."""
        return FamilySettings.for_blocks(
            self.size.block_layer_bytes(self.block_size, self.tensor_parallel)
        )


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex; "absent" if the file does not exist."""
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
