"""Trains the embedded model on its corpus, from nothing, on a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from apar_core.offline.data.tiny_corpus.generator import Corpus, KindWeights, vocabulary_texts
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.packing import PackedTree, join_trees
from apar_core.offline.training.pretrained import pad_token_id
from apar_core.offline.training.recipe import TrainingRecipe
from apar_core.offline.training.reports import OnStep, StepReport
from apar_core.offline.training.tiny_model import build_tiny_model, save_checkpoint
from apar_core.offline.training.tiny_settings import (
    TinyModelSettings,
    TinyTrainingSettings,
    TrainingPhase,
)
from apar_core.offline.training.tokenizer import train_tokenizer
from apar_core.offline.training.tree_trainer import TreeCollator, TreeTrainer, training_arguments
from apar_core.offline.training.weight_average import WeightAverage

# Rows of similar length are batched together; this many batches are drawn and sorted at a time.
_BATCHES_PER_DRAW = 20


@dataclass(frozen=True)
class CorpusTrees(IterableDataset[PackedTree]):
    """A phase's trees in the order of its steps: trees of like length together."""

    kind_weights: KindWeights
    stream: str
    seed: int
    recipe: TrainingRecipe
    encoder: ExampleEncoder
    num_processes: int

    @property
    def rows(self) -> CorpusTrees:
        """Each tree is a row."""
        return self

    @property
    def passes_per_step(self) -> int:
        """How often a process runs the model in a step."""
        return -(-self.recipe.batch_size // self._at_once)

    @property
    def _at_once(self) -> int:
        return self.recipe.micro_batch_size * self.num_processes

    def __iter__(self) -> Iterator[PackedTree]:
        rng = random.Random(self.seed)
        size, remaining = self.recipe.batch_size, self.recipe.num_steps
        corpus = Corpus(self.seed, kind_weights=self.kind_weights, stream=self.stream)
        examples = corpus.examples(remaining * size)
        while remaining:
            num_batches = min(_BATCHES_PER_DRAW, remaining)
            rows = [self.encoder.pack(next(examples)) for _ in range(num_batches * size)]
            rows.sort(key=lambda row: len(row.token_ids))
            groups = [rows[start : start + size] for start in range(0, len(rows), size)]
            rng.shuffle(groups)
            for group in groups:
                missing = -len(group) % self._at_once
                yield from (*group, *[join_trees([])] * missing)
            remaining -= num_batches


def train_phase(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phase: TrainingPhase,
    seed: int,
    on_step: OnStep,
) -> None:
    """Train through one phase, on the CPU."""
    # The Trainer wants a folder; nothing is saved between the phases.
    with TemporaryDirectory() as folder:
        arguments = training_arguments(
            phase.recipe, Path(folder), tensorboard=False, save=False, use_cpu=True
        )
        trainer = TreeTrainer(
            model,
            arguments,
            phase.recipe,
            collator=TreeCollator.for_model(model, pad_token_id(tokenizer)),
            train_rows=CorpusTrees(
                phase.kind_weights,
                phase.stream,
                seed,
                phase.recipe,
                ExampleEncoder(tokenizer, phase.recipe.context_length),
                arguments.world_size,
            ),
            on_step=on_step,
        )
        trainer.train()


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
    average = WeightAverage()
    steps_before = 0
    for phase in training_settings.phases:

        def report(step: StepReport, before: int = steps_before) -> None:
            on_step(replace(step, step=before + step.step, num_steps=training_settings.num_steps))

        train_phase(model, tokenizer, phase, training_settings.seed, report)
        steps_before += phase.recipe.num_steps
        _round_weights(model)
        average.add(model, phase.average_share)
    average.apply(model)
    save_checkpoint(model.eval(), tokenizer, out)
