"""Training recipes: YAML files, shipped or your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, Literal, Self, TypeVar

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
from apar_core.suggestions import did_you_mean, did_you_mean_field
from apar_core.yaml_files import load_yaml

_Decay = Annotated[float, Field(ge=0, lt=1)]

RECIPES = Path(__file__).with_name("recipes")


class LoraSettings(BaseModel):
    """Low-rank adapters on a frozen model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: PositiveInt = Field(16, description="Rank of each adapter.")
    alpha: PositiveInt = Field(32, description="Adapters are scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before each adapter.")
    target_modules: str | tuple[str, ...] = Field(
        "all-linear", description="Names of the adapted layers, or all-linear."
    )
    row_learning_rate: PositiveFloat | None = Field(
        None,
        description="Peak learning rate of the rows of the format's tokens; by default "
        "learning_rate, as for the adapters. New tokens need a higher one than the adapters, which "
        "change how the model writes.",
    )
    merge: bool = Field(
        True,
        description="Merge the adapters into the saved model. Otherwise the base model with the "
        "control tokens is saved, and the adapters in its subfolder `adapter`.",
    )


class Schedule(BaseModel):
    """Learning rate schedule: linear warmup, then cosine or linear decay to zero."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: Literal["cosine", "linear"] = Field("cosine", description="Shape of the decay.")
    warmup_share: float = Field(0.03, ge=0, lt=1, description="Share of the steps for the warmup.")
    decay_share: float = Field(
        1.0, gt=0, le=1, description="Share of the steps for a linear decay, at the end."
    )


class MuonSettings(BaseModel):
    """Muon for the matrices of the layers; AdamW trains embeddings and norms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: PositiveFloat = Field(description="Peak learning rate of Muon.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Momentum of Muon.")


class TrainingRecipe(BaseModel):
    """Settings of a training run. Source: APAR (arXiv 2401.06761), tables 5 and 6."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: PositiveInt = Field(description="Trees per step, over all GPUs.")
    batch_unit: Literal["trees", "sequences"] = Field(
        "trees",
        description="What batch_size and structured_share count. The authors train on one sequence "
        "per thread, and count these. A step then takes whole trees with at least batch_size "
        "sequences.",
    )
    micro_batch_size: PositiveInt = Field(
        1, description="Rows per forward pass and GPU; gradients are accumulated over the batch."
    )
    pack_trees: bool = Field(
        False,
        description="Pack trees into rows of context_length tokens; otherwise one tree per row.",
    )
    num_steps: PositiveInt = Field(description="Optimizer steps.")
    learning_rate: PositiveFloat = Field(description="Peak learning rate of AdamW.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Weight decay of AdamW.")
    adam_betas: tuple[_Decay, _Decay] = Field((0.9, 0.999), description="Betas of AdamW.")
    muon: MuonSettings | None = Field(
        None, description="Muon for the layers' matrices; AdamW for everything if unset."
    )
    schedule: Schedule = Field(Schedule(), description="Learning rate schedule.")
    max_gradient_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this norm.")
    context_length: PositiveInt = Field(
        2048, description="Maximum length of a packed tree (tokens)."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16",
        description="Dtype of loading and of the forward pass; master weights are float32.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    structured_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Probability of drawing a structured example. Prompt tokens and Medusa "
        "heads of a model without control tokens learn from all examples alike.",
    )
    lora: LoraSettings | None = Field(
        None, description="Train LoRA adapters instead of all weights."
    )
    validation_share: float = Field(
        0.02, ge=0, lt=1, description="Share of the examples used for validation."
    )
    validate_every_steps: PositiveInt = Field(200, description="Steps between validations.")
    save_every_steps: PositiveInt = Field(200, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(2, description="Number of checkpoints kept.")
    log_every_steps: PositiveInt = Field(10, description="Steps between reports.")
    num_loaders: NonNegativeInt = Field(
        0, description="Data loader processes; 0 loads batches in the training process."
    )
    vocabulary_multiple: PositiveInt = Field(
        64, description="An extended vocabulary is padded to a multiple of this."
    )
    seed: NonNegativeInt = Field(0, description="Seed for the split, the draws and new weights.")


class FrozenModelRecipe(TrainingRecipe):
    """Settings of a run that trains something beside a frozen model."""

    num_measured: PositiveInt = Field(
        100,
        description="Validation prompts; the model's greedy answers to them give the acceptance "
        "table.",
    )
    measured_tokens: PositiveInt = Field(1024, description="Limit of each of these answers.")

    @model_validator(mode="after")
    def _refuse_unused_settings(self) -> Self:
        for name in ("lora", "gradient_checkpointing"):
            if getattr(self, name):
                raise ValueError(f"{name}: the model is frozen in this training")
        return self


class MedusaRecipe(FrozenModelRecipe):
    """Settings of a run that trains Medusa heads on a frozen model."""

    num_heads: PositiveInt = Field(
        2, description="Number of heads; head k (from 0) predicts the token k + 2 places ahead."
    )
    num_layers: PositiveInt = Field(2, description="Residual layers per head.")
    original_lm_head: bool = Field(
        False,
        description="Whether the heads use the model's output layer instead of a vocabulary matrix "
        "each. They are smaller by far, and vLLM does not load them.",
    )


class PromptRecipe(FrozenModelRecipe):
    """Settings of a run that trains prompt tokens. Source: PPD (arXiv 2405.18628), section 3.3.

    Equation 1 writes D(student || teacher), the reverse divergence, and gives no alpha. The
    authors' training code has the forward divergence and 0.8, the defaults here.
    """

    num_prompts: PositiveInt = Field(
        3, description="Prompt tokens; number d (from 0) predicts the token d + 2 places ahead."
    )
    ensemble: PositiveInt = Field(1, description="Embeddings per prompt token.")
    average: Literal["logits", "probabilities", "learned"] = Field(
        "logits",
        description="What an ensemble averages: logits, probabilities, or logits with learned "
        "weights.",
    )
    mask: Literal["ensemble", "decoder", "encoder"] = Field(
        "ensemble",
        description="What an embedding reads of the prompt tokens before its own: the same member "
        "(ensemble) or all members; with encoder also the other members of its own.",
    )
    exits: PositiveInt = Field(
        1, description="Last layers whose hidden states are averaged for a prediction."
    )
    prefix: bool = Field(
        False,
        description="Train keys and values in front of the text too, those of each prompt token "
        "for itself (appendix B.3).",
    )
    head: Literal["model", "one stage", "two stages"] = Field(
        "model",
        description="Output layer of the prompt tokens: the model's, or a copy that is trained too "
        "(appendix B.4), from the start or after a sixth of the steps and then with a tenth of the "
        "learning rate.",
    )
    loss: Literal["forward_kl", "reverse_kl", "labels"] = Field(
        "forward_kl",
        description="Divergence D(teacher || student) or D(student || teacher), or cross-entropy "
        "with the examples' own tokens, without distillation.",
    )
    alpha: float = Field(
        0.8, gt=0, le=1, description="The loss of prompt token d is weighted by alpha to the d."
    )
    insertion_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Share of an answer's tokens after which prompt tokens are inserted, drawn "
        "anew in each step.",
    )


FrozenRecipeT = TypeVar("FrozenRecipeT", bound=FrozenModelRecipe)


class TinySettings(BaseModel, Generic[FrozenRecipeT]):
    """Recipe of a run beside the embedded model, over the broad mixture of its corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: FrozenRecipeT = Field(
        description="Settings of the run; its seed determines split and draws."
    )
    num_held_out: int = Field(200, ge=1, description="Held-out prompts for the acceptance table.")


class TinyModelSettings(BaseModel):
    """Sizes of the embedded Llama, by default those of apar-tiny, and of its vocabulary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocabulary_size: int = Field(
        4096, ge=300, description="Vocabulary entries, including special tokens."
    )
    hidden_size: PositiveInt = Field(256, description="Width of the hidden states.")
    intermediate_size: PositiveInt = Field(704, description="Width of the MLPs.")
    num_layers: PositiveInt = Field(4, description="Number of layers.")
    num_heads: PositiveInt = Field(8, description="Query heads of a layer.")
    num_key_value_heads: PositiveInt = Field(8, description="Key and value heads of a layer.")
    max_positions: PositiveInt = Field(2048, description="Context length (tokens).")
    rope_theta: PositiveFloat = Field(10000.0, description="Base of the rotary embedding.")


class TrainingPhase(BaseModel):
    """Training run over a mixture of the corpus, from warmup to a learning rate of zero."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mixture: Literal["broad", "finishing", "polishing", "settling", "joining"] = Field(
        description="Sampling weights of the kinds of examples."
    )
    stream: str = Field(description="Name of the sample of examples.")
    average_share: float = Field(
        0.0, ge=0, description="Weight of this phase's result in the saved average."
    )
    start_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the answers that join of which only the starts of threads are "
        "learned.",
    )
    recipe: TrainingRecipe = Field(description="Settings of the run.")


class TinyTrainingSettings(BaseModel):
    """Recipe of the embedded model: several training runs on the same weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: NonNegativeInt = Field(0, description="Seed for split, corpus and weights.")
    model: TinyModelSettings = Field(TinyModelSettings(), description="Sizes of the model.")
    phases: tuple[TrainingPhase, ...] = Field(min_length=1, description="Training runs in order.")
    num_executors: PositiveInt = Field(2, description="CPU threads of torch.")

    @property
    def num_steps(self) -> int:
        """Total steps of all phases."""
        return sum(phase.recipe.num_steps for phase in self.phases)

    def with_num_steps(self, num_steps: int) -> TinyTrainingSettings:
        """Return the recipe with its phases scaled to `num_steps` in total."""
        phases: list[TrainingPhase] = []
        before = steps_so_far = 0
        for phase in self.phases:
            before += phase.recipe.num_steps
            steps = round(num_steps * before / self.num_steps) - steps_so_far
            steps_so_far += steps
            if steps:
                recipe = phase.recipe.model_copy(update={"num_steps": steps})
                phases.append(phase.model_copy(update={"recipe": recipe}))
        return self.model_copy(update={"phases": tuple(phases)})


RecipeT = TypeVar("RecipeT", bound=BaseModel)


def shipped_recipes() -> list[str]:
    """Return the names of the recipes in the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name_or_file: str, kind: type[RecipeT]) -> RecipeT:
    """Return a shipped recipe by name, or that of a YAML file.

    Raises TrainingError for an unknown name, an unreadable file or an invalid field.
    """
    path = RECIPES / f"{name_or_file}.yaml"
    if name_or_file not in shipped_recipes():
        path = Path(name_or_file)
        if not path.is_file():
            raise TrainingError(
                f"recipe {name_or_file!r} is neither a file nor one of "
                f"{', '.join(shipped_recipes())}{did_you_mean(name_or_file, shipped_recipes())}"
            )
    try:
        return kind.model_validate(load_yaml(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TrainingError(f"recipe {path} cannot be read: {error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'recipe'}: {problem['msg']}"
            f"{did_you_mean_field(problem, kind)}"
            for problem in error.errors()
        )
        raise TrainingError(f"recipe {path}: {problems}") from error
