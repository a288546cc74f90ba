"""Sizes and recipe of the embedded model."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from apar_core.offline.data.tiny_corpus.generator import (
    BROAD_WEIGHTS,
    FINISHING_WEIGHTS,
    POLISHING_WEIGHTS,
    SETTLING_WEIGHTS,
    KindWeights,
)
from apar_core.offline.training.recipe import TrainingRecipe, load_recipe

_MIXTURES = {
    "broad": BROAD_WEIGHTS,
    "finishing": FINISHING_WEIGHTS,
    "polishing": POLISHING_WEIGHTS,
    "settling": SETTLING_WEIGHTS,
}


class TinyModelSettings(BaseModel):
    """Shape of the embedded Llama and of its vocabulary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocabulary_size: int = Field(4096, ge=300, description="Entries, special tokens included.")
    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt = 704
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt = 8
    max_positions: PositiveInt = 2048
    rope_theta: PositiveFloat = 10000.0


class TrainingPhase(BaseModel):
    """One run of training over a mixture of the corpus, from warm-up to a rate of zero."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mixture: Literal["broad", "finishing", "polishing", "settling"] = Field(
        description="How often each kind of example is drawn."
    )
    stream: str = Field(description="Names the sequence of examples that is drawn.")
    average_share: float = Field(
        0.0, ge=0, description="Weight of this phase's result in the average that is saved."
    )
    recipe: TrainingRecipe = Field(description="The run.")

    @property
    def kind_weights(self) -> KindWeights:
        """The mixture's weights of the kinds."""
        return _MIXTURES[self.mixture]


class TinyTrainingSettings(BaseModel):
    """Recipe of the embedded model: several runs of training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: NonNegativeInt = Field(0, description="Of the split, the corpus and the weights.")
    phases: tuple[TrainingPhase, ...] = Field(
        min_length=1, description="Runs, one after the other, on the same weights."
    )
    num_executors: PositiveInt = Field(2, description="Operating-system threads of torch.")

    @property
    def num_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.recipe.num_steps for phase in self.phases)

    def with_num_steps(self, num_steps: int) -> TinyTrainingSettings:
        """Return the recipe with its phases stretched or shortened to `num_steps` in all."""
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


def tiny_recipe(name_or_file: str = "apar-tiny") -> TinyTrainingSettings:
    """Return the shipped recipe of the embedded model, or the one in a file."""
    return load_recipe(name_or_file, TinyTrainingSettings)
