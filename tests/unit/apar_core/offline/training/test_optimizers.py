"""Optimizers and learning rate schedules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from apar_core.offline.training.fine_tune import adapted
from apar_core.offline.training.recipe import (
    LoraSettings,
    MuonSettings,
    Schedule,
    TrainingRecipe,
)
from apar_core.offline.training.tree_trainer import JointOptimizer, build_optimizer, rate_factor
from tests.unit.apar_core.offline.training.random_trees import random_model

RECIPE = TrainingRecipe(
    batch_size=1, num_steps=1, learning_rate=4e-3, weight_decay=0.1, adam_betas=(0.9, 0.95)
)
WITH_MUON = RECIPE.model_copy(update={"muon": MuonSettings(learning_rate=0.02, momentum=0.5)})


def test_muon_trains_the_layers_matrices_and_adamw_everything_else() -> None:
    model = random_model()

    joint = build_optimizer(model, WITH_MUON)

    assert isinstance(joint, JointOptimizer)
    muon, adamw = joint.parts
    num_muon = len(muon.param_groups[0]["params"])
    assert num_muon == 14
    num_adamw = sum(len(group["params"]) for group in adamw.param_groups)
    assert num_muon + num_adamw == len(list(model.parameters()))
    assert muon.param_groups[0]["momentum"] == 0.5
    assert [part.param_groups[0]["lr"] for part in joint.parts] == [0.02, 4e-3]


def test_adamw_alone_decays_matrices_and_leaves_norms() -> None:
    optimizer = build_optimizer(random_model(), RECIPE)

    decays = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert set(decays) == {0.1, 0.0}
    assert all(parameter.ndim == 2 for parameter in decays[0.1])
    assert all(parameter.ndim == 1 for parameter in decays[0.0])
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


def test_frozen_weights_are_left_out() -> None:
    model = copy.deepcopy(random_model())
    model.model.requires_grad_(False)

    optimizer = build_optimizer(model, RECIPE)

    assert [p.shape for group in optimizer.param_groups for p in group["params"]] == [(40, 32)]


def test_the_rows_of_new_tokens_have_their_own_rate() -> None:
    lora = LoraSettings(row_learning_rate=0.5)
    model = adapted(copy.deepcopy(random_model()), lora, [3, 4])

    optimizer = build_optimizer(model, RECIPE.model_copy(update={"lora": lora}))

    rates = {
        group["lr"]: [tuple(parameter.shape) for parameter in group["params"]]
        for group in optimizer.param_groups
    }
    assert rates.pop(0.5) == [(2, 32)] * (1 if model.config.tie_word_embeddings else 2)
    assert list(rates) == [RECIPE.learning_rate]


def steps(optimizer: JointOptimizer, model: torch.nn.Module, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_a_joint_optimizer_resumes_from_its_saved_state() -> None:
    whole, halved = copy.deepcopy(random_model()), copy.deepcopy(random_model())
    first, second = build_optimizer(whole, WITH_MUON), build_optimizer(halved, WITH_MUON)
    assert isinstance(first, JointOptimizer)
    assert isinstance(second, JointOptimizer)
    steps(first, whole, range(4))
    steps(second, halved, range(2))
    state = copy.deepcopy(second.state_dict())
    resumed = build_optimizer(halved, WITH_MUON)
    assert isinstance(resumed, JointOptimizer)

    resumed.load_state_dict(state)
    steps(resumed, halved, range(2, 4))

    for ours, theirs in zip(halved.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_schedule_reaches_all_parts() -> None:
    joint = build_optimizer(copy.deepcopy(random_model()), WITH_MUON)
    assert isinstance(joint, JointOptimizer)

    LambdaLR(joint, lambda step: 0.5)

    assert [part.param_groups[0]["lr"] for part in joint.parts] == [0.01, 2e-3]


def test_a_linear_rate_rises_stays_and_falls() -> None:
    schedule = Schedule(shape="linear", warmup_share=0.1, decay_share=0.5)

    assert rate_factor(0, 100, schedule) == pytest.approx(0.1)
    assert rate_factor(9, 100, schedule) == rate_factor(50, 100, schedule) == 1
    assert rate_factor(75, 100, schedule) == pytest.approx(0.5)
    assert rate_factor(100, 100, schedule) == 0


def test_a_cosine_rate_rises_and_falls_along_half_a_wave() -> None:
    schedule = Schedule(shape="cosine", warmup_share=0.1)

    assert rate_factor(0, 100, schedule) == pytest.approx(0.1)
    assert rate_factor(10, 100, schedule) == 1
    assert rate_factor(55, 100, schedule) == pytest.approx(0.5)
    assert rate_factor(100, 100, schedule) == pytest.approx(0, abs=1e-12)
    assert rate_factor(0, 100, Schedule(warmup_share=0)) == 1
