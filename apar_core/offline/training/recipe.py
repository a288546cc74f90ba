"""Recipes: how a model is trained, as YAML files that are shipped or written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from apar_core.errors import TrainingError

_Decay = Annotated[float, Field(ge=0, lt=1)]

RECIPES = Path(__file__).with_name("recipes")


class LoraSettings(BaseModel):
    """Low-rank adapters on a frozen model; they are merged into it when training ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: PositiveInt = Field(16, description="Rank of every adapter.")
    alpha: PositiveInt = Field(32, description="Adapters are scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before every adapter.")
    target_modules: str | tuple[str, ...] = Field(
        "all-linear", description="Names of the adapted layers, or all-linear."
    )


class Schedule(BaseModel):
    """The learning rate over the steps, as a share of the full one.

    It rises over `warmup_share` of the steps, then falls to zero: along a cosine, or in a straight
    line over the last `decay_share` of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: Literal["cosine", "linear"] = Field("cosine", description="How it falls to zero.")
    warmup_share: float = Field(0.03, ge=0, lt=1, description="Share of the steps it rises over.")
    decay_share: float = Field(
        1.0, gt=0, le=1, description="linear: share of the steps it falls over."
    )


class MuonSettings(BaseModel):
    """Muon for the matrices of the layers, beside AdamW for embeddings and norms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: PositiveFloat = Field(description="Full learning rate of the matrices.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Share of the last update that stays.")


class TrainingRecipe(BaseModel):
    """One training run over packed trees. Tables 5 and 6 of APAR (arXiv 2401.06761)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: PositiveInt = Field(description="Trees that one step learns from, over all GPUs.")
    micro_batch_size: PositiveInt = Field(
        1, description="Rows in one forward pass of one GPU; the rest is accumulated."
    )
    pack_trees: bool = Field(
        False, description="Fill rows of context_length tokens with trees; else one tree a row."
    )
    num_steps: PositiveInt = Field(description="Updates of the weights.")
    learning_rate: PositiveFloat = Field(description="Full learning rate of AdamW.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Weight decay of AdamW.")
    adam_betas: tuple[_Decay, _Decay] = Field((0.9, 0.999), description="Moments of AdamW.")
    muon: MuonSettings | None = Field(None, description="Muon for matrices; AdamW alone if unset.")
    schedule: Schedule = Field(Schedule(), description="Learning rate over the steps.")
    max_gradient_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this.")
    context_length: PositiveInt = Field(2048, description="Tokens of the longest packed tree.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16",
        description="Dtype of loading and of the forward pass; weights are updated in float32.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass to save memory."
    )
    structured_share: float = Field(
        0.5, ge=0, le=1, description="Share of the draws that comes from forking answers."
    )
    lora: LoraSettings | None = Field(None, description="Train adapters instead of all weights.")
    validation_share: float = Field(
        0.02, ge=0, lt=1, description="Share of the examples kept for validation."
    )
    validate_every_steps: PositiveInt = Field(200, description="Steps between validations.")
    save_every_steps: PositiveInt = Field(200, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(2, description="Newest checkpoints that are kept.")
    log_every_steps: PositiveInt = Field(10, description="Steps between reports.")
    num_loaders: NonNegativeInt = Field(
        0, description="Processes that pad batches ahead; 0 does it between steps."
    )
    vocabulary_multiple: PositiveInt = Field(
        64, description="A vocabulary that grows is padded to a multiple of this."
    )
    seed: NonNegativeInt = Field(0, description="Of the split, the draws and new weights.")


class MedusaRecipe(TrainingRecipe):
    """A run that trains Medusa heads on a frozen model."""

    num_heads: PositiveInt = Field(2, description="Heads; head k learns the token k + 2 ahead.")
    num_layers: PositiveInt = Field(2, description="Residual layers of every head.")

    @model_validator(mode="after")
    def _refuse_what_heads_have_no_use_for(self) -> Self:
        for name in ("lora", "gradient_checkpointing"):
            if getattr(self, name):
                raise ValueError(f"{name}: the model is frozen while heads learn")
        return self


RecipeT = TypeVar("RecipeT", bound=BaseModel)


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name_or_file: str, kind: type[RecipeT]) -> RecipeT:
    """Return a shipped recipe by its name, or the one in a YAML file.

    Raises TrainingError for an unknown name, unreadable YAML, or a field that is wrong.
    """
    path = RECIPES / f"{name_or_file}.yaml"
    if name_or_file not in shipped_recipes():
        path = Path(name_or_file)
        if not path.is_file():
            raise TrainingError(
                f"recipe {name_or_file!r} is neither a file nor one of "
                f"{', '.join(shipped_recipes())}"
            )
    try:
        return kind.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TrainingError(f"recipe {path} cannot be read: {error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'recipe'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise TrainingError(f"recipe {path}: {problems}") from error
