"""Sizes and recipe of the embedded model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt


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


class TinyTrainingSettings(BaseModel):
    """Recipe of the embedded model: packed trees, Muon for matrices and AdamW for the rest.

    Both learning rates rise over `warmup_share` of the steps, stay, and fall to zero over
    `decay_share`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: NonNegativeInt = Field(0, description="Of the split, the corpus and the weights.")
    num_steps: PositiveInt = 1300
    trees_per_step: PositiveInt = 8
    matrix_learning_rate: PositiveFloat = Field(0.02, description="Muon: layers' matrices.")
    matrix_momentum: float = Field(0.95, ge=0, lt=1)
    vector_learning_rate: PositiveFloat = Field(4e-3, description="AdamW: embeddings, norms.")
    warmup_share: float = Field(0.02, gt=0, lt=1)
    decay_share: float = Field(0.6, gt=0, lt=1)
    max_gradient_norm: PositiveFloat = 1.0
    num_executors: PositiveInt = Field(2, description="Operating-system threads of torch.")
