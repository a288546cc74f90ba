"""Trains the embedded model on its corpus, from nothing, on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from apar_core.data.records import ExampleRecord
from apar_core.data.tiny_corpus.generator import Corpus, vocabulary_texts
from apar_core.training.packing import (
    IGNORED_TARGET,
    PackedTree,
    TreeBatch,
    batch_trees,
    pack_tree,
)
from apar_core.training.tiny_model import build_tiny_model, save_checkpoint, tree_tokens
from apar_core.training.tiny_settings import (
    TinyModelSettings,
    TinyTrainingSettings,
    TrainingPhase,
)
from apar_core.training.tokenizer import train_tokenizer
from apar_core.training.weight_average import WeightAverage

# Rows of similar length are batched together; this many batches are drawn and sorted at a time.
_BATCHES_PER_DRAW = 20


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one training step did: its loss per learned token and its size."""

    step: int
    num_steps: int
    loss: float
    num_targets: int


OnStep = Callable[[StepReport], None]


def prompt_token_ids(example: ExampleRecord, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the tokens that the server would send to the model for this prompt."""
    if example.raw_prompt:
        return list(tokenizer(example.messages[-1].content)["input_ids"])
    chat = [message.as_dict() for message in example.messages]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def pack_example(example: ExampleRecord, tokenizer: PreTrainedTokenizerFast) -> PackedTree:
    """Return the example as one packed row."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompt_ids = prompt_token_ids(example, tokenizer)
    return pack_tree(prompt_ids, example.answer, encode, tree_tokens(tokenizer))


def tree_loss(model: LlamaForCausalLM, batch: TreeBatch) -> Tensor:
    """Return the mean loss over all targets of the batch (a scalar)."""
    hidden_BTD = model.model(
        input_ids=batch.token_ids_BT,
        position_ids=batch.positions_BT,
        attention_mask=batch.mask_B1TT,
    ).last_hidden_state
    learned_BT = batch.targets_BT != IGNORED_TARGET
    logits_NV = model.lm_head(hidden_BTD[learned_BT])
    return cross_entropy(logits_NV.float(), batch.targets_BT[learned_BT])


def _batches(
    phase: TrainingPhase, seed: int, tokenizer: PreTrainedTokenizerFast
) -> Iterator[TreeBatch]:
    """Yield one batch per step, rows of like length together, batches in random order."""
    rng = random.Random(seed)
    size = phase.trees_per_step
    corpus = Corpus(seed, kind_weights=phase.kind_weights, stream=phase.stream)
    examples = corpus.examples(phase.num_steps * size)
    remaining = phase.num_steps
    while remaining:
        num_batches = min(_BATCHES_PER_DRAW, remaining)
        rows = [pack_example(next(examples), tokenizer) for _ in range(num_batches * size)]
        rows.sort(key=lambda row: len(row.token_ids))
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        rng.shuffle(groups)
        for group in groups:
            yield batch_trees(group, tokenizer.pad_token_id)
        remaining -= num_batches


def build_optimizers(
    model: LlamaForCausalLM, phase: TrainingPhase, momentum: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for embeddings and norms."""
    matrices: list[Parameter] = []
    rest: list[Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if "layers." in name and parameter.ndim == 2 else rest).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=phase.matrix_learning_rate, momentum=momentum, weight_decay=0.0
        ),
        torch.optim.AdamW(rest, lr=phase.vector_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(step: int, phase: TrainingPhase) -> float:
    """Return the share of the full learning rates that step `step` (from 0) of a phase gets."""
    rising = (step + 1) / phase.num_steps / phase.warmup_share
    falling = (1 - step / phase.num_steps) / phase.decay_share
    return min(1.0, rising, falling)


def _train_phase(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phase: TrainingPhase,
    settings: TinyTrainingSettings,
) -> Iterator[tuple[float, int]]:
    """Train through one phase; yield each step's loss and number of targets."""
    optimizers = build_optimizers(model, phase, settings.matrix_momentum)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, phase))
        for optimizer in optimizers
    ]
    for batch in _batches(phase, settings.seed, tokenizer):
        loss = tree_loss(model, batch)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        yield loss.item(), int((batch.targets_BT != IGNORED_TARGET).sum())


def _round_weights(model: LlamaForCausalLM) -> None:
    """Round all weights to bfloat16, so that a phase can also start from a saved checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def train_tiny(
    out: Path,
    model_settings: TinyModelSettings,
    training_settings: TinyTrainingSettings,
    on_step: OnStep,
) -> None:
    """Train the model and write its checkpoint to `out`.

    The same settings, libraries and processor give the same weights.
    """
    torch.set_num_threads(training_settings.num_executors)
    torch.manual_seed(training_settings.seed)
    tokenizer = train_tokenizer(
        vocabulary_texts(training_settings.seed),
        vocabulary_size=model_settings.vocabulary_size,
        max_length=model_settings.max_positions,
    )
    model = build_tiny_model(model_settings, tokenizer)
    model.train()
    average = WeightAverage()
    step = 0
    for phase in training_settings.phases:
        for loss, num_targets in _train_phase(model, tokenizer, phase, training_settings):
            step += 1
            on_step(StepReport(step, training_settings.num_steps, loss, num_targets))
        _round_weights(model)
        average.add(model, phase.average_share)
    average.apply(model)
    save_checkpoint(model.eval(), tokenizer, out)
