"""Optimizers and learning rates of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import AdamW, Muon, Optimizer

from apar_core.offline.training.recipe import Schedule, TrainingRecipe


class JointOptimizer(Optimizer):
    """Several optimizers as one: its parameter groups are theirs."""

    def __init__(self, parts: Iterable[Optimizer]) -> None:
        self.parts = list(parts)
        groups = [group for part in self.parts for group in part.param_groups]
        super().__init__(groups, {})
        # The very dictionaries of the parts, so that a scheduler's rates reach them.
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights of every part."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the parts' states; `state` and `param_groups` are what wrappers look for."""
        return {
            "state": {},
            "param_groups": [],
            "parts": [part.state_dict() for part in self.parts],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the parts' states."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build_optimizer(model: Module, recipe: TrainingRecipe) -> Optimizer:
    """Return AdamW over all that learns, with Muon for the layers' matrices if the recipe asks."""
    matrices: list[Parameter] = []
    rest: list[Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            muon = recipe.muon is not None and "layers." in name and parameter.ndim == 2
            (matrices if muon else rest).append(parameter)
    # Norms and biases do not decay.
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(
        [group for group in groups if group["params"]],
        lr=recipe.learning_rate,
        betas=recipe.adam_betas,
    )
    if recipe.muon is None:
        return adamw
    muon_optimizer = Muon(
        matrices,
        lr=recipe.muon.learning_rate,
        momentum=recipe.muon.momentum,
        weight_decay=recipe.weight_decay,
    )
    return JointOptimizer([muon_optimizer, adamw])


def rate_factor(step: int, num_steps: int, schedule: Schedule) -> float:
    """Return the share of the full learning rates that step `step` (from 0) gets."""
    warmup = num_steps * schedule.warmup_share
    rising = (step + 1) / warmup if warmup else 1.0
    if schedule.shape == "linear":
        falling = (1 - step / num_steps) / schedule.decay_share
    else:
        done = max(0.0, step - warmup) / max(1.0, num_steps - warmup)
        falling = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return min(1.0, rising, falling)
