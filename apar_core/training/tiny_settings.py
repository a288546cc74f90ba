"""Sizes and recipe of the embedded model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from apar_core.data.tiny_corpus.generator import (
    BROAD_WEIGHTS,
    FINISHING_WEIGHTS,
    POLISHING_WEIGHTS,
    SETTLING_WEIGHTS,
    KindWeights,
)


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
    """One pass over a mixture of examples, from warm-up to a learning rate of zero.

    Both learning rates rise over `warmup_share` of the steps, stay, and fall over `decay_share`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str = Field(description="Names the sequence of examples that is drawn.")
    kind_weights: KindWeights
    num_steps: PositiveInt
    trees_per_step: PositiveInt
    matrix_learning_rate: PositiveFloat = Field(description="Muon: layers' matrices.")
    vector_learning_rate: PositiveFloat = Field(description="AdamW: embeddings, norms.")
    warmup_share: float = Field(gt=0, lt=1)
    decay_share: float = Field(gt=0, lt=1)
    average_share: float = Field(
        0.0, ge=0, description="Weight of this phase's result in the average that is saved."
    )


BROAD_PHASE = TrainingPhase(
    stream="",
    kind_weights=BROAD_WEIGHTS,
    num_steps=1300,
    trees_per_step=8,
    matrix_learning_rate=0.02,
    vector_learning_rate=4e-3,
    warmup_share=0.02,
    decay_share=0.6,
)
FINISHING_PHASE = TrainingPhase(
    stream="finishing",
    kind_weights=FINISHING_WEIGHTS,
    num_steps=360,
    trees_per_step=16,
    matrix_learning_rate=0.01,
    vector_learning_rate=2e-3,
    warmup_share=0.03,
    decay_share=0.9,
    average_share=0.2,
)
POLISHING_PHASE = TrainingPhase(
    stream="polishing",
    kind_weights=POLISHING_WEIGHTS,
    num_steps=440,
    trees_per_step=16,
    matrix_learning_rate=0.008,
    vector_learning_rate=1.5e-3,
    warmup_share=0.03,
    decay_share=0.9,
    average_share=0.4,
)
SETTLING_PHASE = POLISHING_PHASE.model_copy(
    update={"stream": "settling", "kind_weights": SETTLING_WEIGHTS, "num_steps": 280}
)


class TinyTrainingSettings(BaseModel):
    """Recipe of the embedded model: packed trees, Muon for matrices and AdamW for the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: NonNegativeInt = Field(0, description="Of the split, the corpus and the weights.")
    phases: tuple[TrainingPhase, ...] = Field(
        (BROAD_PHASE, FINISHING_PHASE, POLISHING_PHASE, SETTLING_PHASE), min_length=1
    )
    matrix_momentum: float = Field(0.95, ge=0, lt=1)
    max_gradient_norm: PositiveFloat = 1.0
    num_executors: PositiveInt = Field(2, description="Operating-system threads of torch.")

    @property
    def num_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.num_steps for phase in self.phases)

    def with_num_steps(self, num_steps: int) -> TinyTrainingSettings:
        """Return the recipe with its phases stretched or shortened to `num_steps` in all."""
        phases: list[TrainingPhase] = []
        before = steps_so_far = 0
        for phase in self.phases:
            before += phase.num_steps
            steps = round(num_steps * before / self.num_steps) - steps_so_far
            steps_so_far += steps
            if steps:
                phases.append(phase.model_copy(update={"num_steps": steps}))
        return self.model_copy(update={"phases": tuple(phases)})
