"""The average of a model's weights at several moments of its training."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module


@dataclass
class WeightAverage:
    """Collects weights with their shares; the shares need not sum to one."""

    total_share: float = 0.0
    _sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, model: Module, share: float) -> None:
        """Count the model's present weights with this share; a share of zero leaves them out."""
        if share == 0:
            return
        self.total_share += share
        for name, parameter in model.named_parameters():
            counted = share * parameter.detach()
            self._sums[name] = self._sums[name] + counted if name in self._sums else counted

    def apply(self, model: Module) -> None:
        """Give the model the average, or leave it as it is if nothing was counted."""
        if not self._sums:
            return
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._sums[name] / self.total_share)
