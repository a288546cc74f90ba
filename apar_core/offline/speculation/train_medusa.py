"""Training of Medusa heads on the hidden states of a frozen APAR model.

Dimensions: B rows, T tokens of the longest row, D hidden size, H heads, N tokens with a target, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from apar_core.errors import TrainingError
from apar_core.offline.data.tiny_corpus.generator import BROAD_WEIGHTS, Corpus
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.measure_acceptance import measure_and_write, prompts_of
from apar_core.offline.speculation.medusa_heads import MedusaHeads, save_medusa_heads
from apar_core.offline.training.example_encoder import EncodingCounts, ExampleEncoder
from apar_core.offline.training.fine_tune import (
    Padding,
    last_checkpoint,
    plan_rows,
    read_groups,
    run_inputs,
    train_from,
)
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, next_indices
from apar_core.offline.training.pretrained import (
    check_model,
    is_sharded,
    load_model,
    load_tokenizer,
    pad_token_id,
    recipe_dtype,
)
from apar_core.offline.training.recipe import MedusaRecipe, load_recipe
from apar_core.offline.training.train_tiny import CorpusTrees
from apar_core.offline.training.tree_dataset import RowList
from apar_core.offline.training.tree_forward import hidden_states
from apar_core.offline.training.tree_trainer import (
    Batch,
    OnStep,
    TreeCollator,
    TreeTrainer,
    training_arguments,
    tree_batch,
)

HEAD_TARGETS = "head_targets_HBT"


def head_targets(packed: PackedTree, num_heads: int) -> list[list[int]]:
    """Return the targets of each head: the token k + 2 places ahead in the same thread for head k.

    So a token before [Fork] proposes the continuation of its own thread, and [Child], which the
    server injects, is never proposed. Of the prompt, only the last token has targets. The last
    target is the end of the thread.
    """
    following = next_indices(packed)
    by_head: list[list[int]] = []
    wanted = list(packed.targets)
    for _ in range(num_heads):
        wanted = [
            IGNORED_TARGET
            if target == IGNORED_TARGET or (after := following[index]) is None
            else wanted[after]
            for index, target in enumerate(packed.targets)
        ]
        by_head.append(wanted)
    return by_head


@dataclass(frozen=True, slots=True)
class MedusaCollator:
    """Adds the heads' targets to a padded micro-batch."""

    trees: TreeCollator
    num_heads: int

    def __call__(self, trees: Sequence[PackedTree]) -> dict[str, Tensor]:
        """Return one micro-batch."""
        batch = self.trees(trees)
        shape = (self.num_heads, *batch["targets_BT"].shape)
        targets_HBT = torch.full(shape, IGNORED_TARGET)
        for row, tree in enumerate(trees):
            length = len(tree.token_ids)
            targets_HBT[:, row, :length] = torch.tensor(head_targets(tree, self.num_heads))
        return batch | {HEAD_TARGETS: targets_HBT}


def initial_heads(model: PreTrainedModel, *, num_heads: int, num_layers: int) -> MedusaHeads:
    """Return float32 heads that start as copies of the model's output layer."""
    output = model.get_output_embeddings()
    assert isinstance(output, Module)
    weight = output.weight
    assert isinstance(weight, Tensor)
    return MedusaHeads.like_lm_head(
        weight.detach().float(), num_heads=num_heads, num_layers=num_layers
    )


class MedusaTrainer(TreeTrainer):
    """Trainer whose loss is the mean over the targets of all heads."""

    def __init__(self, heads: MedusaHeads, frozen: PreTrainedModel, *args: Any, **kw: Any) -> None:
        super().__init__(heads, *args, **kw)
        self.frozen = frozen.eval().requires_grad_(False).to(self.args.device)

    def count_targets(self, batch: Batch) -> int:
        """Return the number of targets of all heads."""
        return int((batch[HEAD_TARGETS] != IGNORED_TARGET).sum())

    def summed_loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the loss summed over the targets of all heads."""
        logits_HNV, targets_HN = self.proposals(model, batch)
        return cross_entropy(
            logits_HNV.flatten(0, 1).float(),
            targets_HN.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )

    def proposals(self, heads: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits [H, N, V] and targets [H, N] of all tokens with a target for some head."""
        targets_HBT = batch[HEAD_TARGETS]
        learning_BT = (targets_HBT != IGNORED_TARGET).any(0)
        with torch.no_grad():
            hidden_ND = hidden_states(self.frozen, tree_batch(batch))[learning_BT]
        # A copy that is not an inference tensor, in the dtype of the heads.
        logits_HNV: Tensor = heads(hidden_ND.clone().float())
        return logits_HNV, targets_HBT[:, learning_BT]

    @torch.no_grad()
    def accuracy(self) -> list[float]:
        """Return each head's top-1 accuracy on the validation targets."""
        heads = self.accelerator.unwrap_model(self.model)
        assert isinstance(heads, MedusaHeads)
        num_heads = heads.settings.medusa_num_heads
        sums = torch.zeros(2, num_heads, dtype=torch.float64, device=self.args.device)
        for inputs in self.get_eval_dataloader():
            logits_HNV, targets_HN = self.proposals(heads, self._prepare_inputs(inputs))
            learned_HN = targets_HN != IGNORED_TARGET
            sums[0] += ((logits_HNV.argmax(-1) == targets_HN) & learned_HN).sum(1)
            sums[1] += learned_HN.sum(1)
        total = self.accelerator.reduce(sums, "sum")
        return [float(share) for share in total[0] / total[1].clamp(min=1)]


@dataclass(frozen=True, slots=True)
class MedusaResult:
    """Outcome of a run; `accuracy` is each head's top-1 accuracy on validation."""

    counts: EncodingCounts
    padding: Padding
    validation_loss: float | None
    accuracy: tuple[float, ...]
    table: AcceptanceTable | None


def train_medusa(
    model_name: str,
    data: Path,
    out: Path,
    recipe: MedusaRecipe,
    *,
    resume: bool = False,
    on_step: OnStep | None = None,
) -> MedusaResult:
    """Train heads for a model and write them to `out`, for vLLM and our decoder.

    Their acceptance table is measured on the model's greedy answers to validation prompts; without
    a validation share there is none. Raises TrainingError or DataError for invalid inputs.
    """
    tokenizer = load_tokenizer(model_name)
    inputs = run_inputs(model_name, tokenizer, data)
    last = last_checkpoint(out, recipe, inputs, resume=resume)
    check_model(model_name, recipe.context_length)
    if is_sharded():
        raise TrainingError("heads cannot be sharded: train without FSDP")
    arguments = training_arguments(recipe, out, tensorboard=True, save=True)
    model = load_model(model_name, recipe_dtype(recipe), arguments.device)
    encoder = ExampleEncoder(tokenizer, recipe.context_length)
    training, validation = read_groups(data, encoder).split(recipe.validation_share, recipe.seed)
    collator = TreeCollator.for_model(model, pad_token_id(tokenizer))
    plan = plan_rows(training, validation, recipe, arguments.world_size, collator.multiple)
    heads = initial_heads(model, num_heads=recipe.num_heads, num_layers=recipe.num_layers)
    trainer = MedusaTrainer(
        heads,
        model,
        arguments,
        recipe,
        collator=MedusaCollator(collator, recipe.num_heads),
        train_rows=plan.training,
        validation_rows=plan.validation,
        validate=bool(validation.all_rows),
        on_step=on_step,
    )
    train_from(last, trainer, out, inputs)
    loss = trainer.final_validation_loss() if validation.all_rows else None
    accuracy = trainer.accuracy() if validation.all_rows else []
    table = None
    if trainer.is_world_process_zero():
        save_medusa_heads(heads.bfloat16(), out)
        if validation.all_rows:
            chosen = prompts_of(validation.all_rows, recipe.num_measured, recipe.seed)
            table = measure_and_write(model, tokenizer, heads, chosen, out)
    return MedusaResult(encoder.counts, plan.padding, loss, tuple(accuracy), table)


class TinyMedusaSettings(BaseModel):
    """Recipe of the embedded model's heads: one run over the broad mixture of its corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: MedusaRecipe = Field(
        description="Settings of the run; its seed determines split and draws."
    )
    num_held_out: int = Field(200, ge=1, description="Held-out examples for accuracy and table.")


def tiny_medusa_recipe(name_or_file: str = "apar-tiny-medusa") -> TinyMedusaSettings:
    """Load a recipe of the embedded model's heads by name or file."""
    return load_recipe(name_or_file, TinyMedusaSettings)


def train_tiny_medusa(
    checkpoint: Path, out: Path, settings: TinyMedusaSettings, on_step: OnStep | None = None
) -> list[float]:
    """Train heads for the checkpoint on a CPU; return their accuracy.

    Writes them to `out` with their acceptance table.
    """
    recipe = settings.recipe
    tokenizer = load_tokenizer(str(checkpoint))
    model = load_model(str(checkpoint), torch.float32, torch.device("cpu"))
    encoder = ExampleEncoder(tokenizer, recipe.context_length)
    held_out = encoder.encode_all(
        Corpus(recipe.seed, held_out=True).examples(settings.num_held_out)
    )
    heads = initial_heads(model, num_heads=recipe.num_heads, num_layers=recipe.num_layers)
    with TemporaryDirectory() as folder:
        arguments = training_arguments(
            recipe, Path(folder), tensorboard=False, save=False, use_cpu=True
        )
        trainer = MedusaTrainer(
            heads,
            model,
            arguments,
            recipe,
            collator=MedusaCollator(
                TreeCollator.for_model(model, pad_token_id(tokenizer)), recipe.num_heads
            ),
            train_rows=CorpusTrees(
                BROAD_WEIGHTS, "medusa", recipe.seed, recipe, encoder, arguments.world_size
            ),
            validation_rows=RowList([[row] for row in held_out]),
            on_step=on_step,
        )
        trainer.train()
        accuracy = trainer.accuracy()
    save_medusa_heads(heads.bfloat16(), out)
    measure_and_write(
        model, tokenizer, heads, prompts_of(held_out, len(held_out), recipe.seed), out
    )
    return accuracy
