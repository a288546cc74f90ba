"""Averages of weights."""

import torch
from torch.nn import Linear

from apar_core.offline.training.train_tiny import WeightAverage


def linear(value: float) -> Linear:
    layer = Linear(2, 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer


def test_weights_are_averaged_by_their_shares() -> None:
    average, model = WeightAverage(), linear(100.0)
    average.add(linear(1.0), 1.0)
    average.add(linear(5.0), 3.0)
    average.add(model, 0.0)

    average.apply(model)

    assert all(torch.equal(p, torch.full_like(p, 4.0)) for p in model.parameters())


def test_a_model_stays_as_it_is_if_nothing_was_counted() -> None:
    model = linear(7.0)

    WeightAverage().apply(model)

    assert all(torch.equal(p, torch.full_like(p, 7.0)) for p in model.parameters())
