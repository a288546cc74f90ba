"""Training on packed trees with transformers' Trainer: optimizers, schedule, loss and reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import IntervalStrategy

from apar_core.errors import TrainingError
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, TreeBatch, batch_trees
from apar_core.offline.training.recipe import Schedule, TrainingRecipe
from apar_core.offline.training.tree_dataset import RowList
from apar_core.offline.training.tree_forward import FLEX, FLEX_BLOCK_TOKENS, summed_tree_loss

CHECKPOINTS = "checkpoints"
# In peft's names of the rows that it trains beside an adapter.
_TRAINED_ROWS = "trainable_tokens_delta"
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Mean loss per target and throughput since the last report.

    `padding_share` is the share of padding among the tokens that the model processed.
    `validation_loss` is set only in the first report after a validation.
    """

    step: int
    num_steps: int
    loss: float
    num_targets: int
    num_trees: int = 0
    padding_share: float = 0.0
    seconds: float = 0.0
    learning_rate: float = 0.0
    validation_loss: float | None = None

    @property
    def learned_tokens_per_s(self) -> float:
        """Targets per second, over all processes."""
        return self.num_targets / self.seconds if self.seconds else 0.0

    @property
    def trees_per_s(self) -> float:
        """Trees per second, over all processes."""
        return self.num_trees / self.seconds if self.seconds else 0.0


OnStep = Callable[[StepReport], None]


class JointOptimizer(Optimizer):
    """Several optimizers as one; it shares their parameter groups."""

    def __init__(self, parts: Iterable[Optimizer]) -> None:
        self.parts = list(parts)
        groups = [group for part in self.parts for group in part.param_groups]
        super().__init__(groups, {})
        # The same dictionaries as in the parts, so a scheduler's learning rates reach them.
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights of every part."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts; wrappers require `state` and `param_groups`."""
        return {
            "state": {},
            "param_groups": [],
            "parts": [part.state_dict() for part in self.parts],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of the parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build_optimizer(model: Module, recipe: TrainingRecipe) -> Optimizer:
    """Return AdamW for all trained parameters, with Muon for the layers' matrices if configured.

    The rows of a format's tokens have their own learning rate if the recipe gives one.
    """
    matrices: list[Parameter] = []
    new_rows: list[Parameter] = []
    rest: list[Parameter] = []
    row_rate = None if recipe.lora is None else recipe.lora.row_learning_rate
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            muon = recipe.muon is not None and "layers." in name and parameter.ndim == 2
            is_rows = row_rate is not None and _TRAINED_ROWS in name
            (matrices if muon else new_rows if is_rows else rest).append(parameter)
    # Norms and biases have no weight decay.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        {"params": new_rows, "weight_decay": 0.0, "lr": row_rate},
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
    """Return the factor of the learning rates in step `step` (from 0)."""
    warmup = num_steps * schedule.warmup_share
    rising = (step + 1) / warmup if warmup else 1.0
    if schedule.shape == "linear":
        falling = (1 - step / num_steps) / schedule.decay_share
    else:
        done = max(0.0, step - warmup) / max(1.0, num_steps - warmup)
        falling = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return min(1.0, rising, falling)


@dataclass(frozen=True, slots=True)
class TreeCollator:
    """Pads packed trees to the tensors of a TreeBatch, by name.

    The model's attention needs a width that is a multiple of `multiple`.
    """

    pad_id: int
    multiple: int = 1

    @classmethod
    def for_model(cls, model: PreTrainedModel, pad_id: int) -> Self:
        """Return a collator for the model's attention implementation."""
        flex = model.config._attn_implementation == FLEX
        return cls(pad_id, FLEX_BLOCK_TOKENS if flex else 1)

    def __call__(self, trees: Sequence[PackedTree]) -> Batch:
        """Return one micro-batch."""
        return asdict(batch_trees(trees, self.pad_id, multiple=self.multiple))


def tree_batch(batch: Batch) -> TreeBatch:
    """Return the trees of a micro-batch, which may contain further tensors."""
    return TreeBatch(**{field.name: batch[field.name] for field in fields(TreeBatch)})


@dataclass
class _Progress:
    """Counts since the last report."""

    num_targets: int = 0
    num_trees: int = 0
    num_tokens: int = 0
    num_processed_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)


def training_arguments(
    recipe: TrainingRecipe,
    out: Path,
    *,
    tensorboard: bool,
    save: bool,
    use_cpu: bool = False,
) -> TrainingArguments:
    """Return the Trainer's arguments for a recipe; without CUDA it trains on the CPU."""
    use_cpu = use_cpu or not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        per_device_train_batch_size=recipe.micro_batch_size,
        per_device_eval_batch_size=recipe.micro_batch_size,
        max_steps=recipe.num_steps,
        max_grad_norm=recipe.max_gradient_norm,
        bf16=recipe.dtype == "bfloat16",
        gradient_checkpointing=recipe.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=recipe.seed,
        use_cpu=use_cpu,
        dataloader_num_workers=recipe.num_loaders,
        dataloader_pin_memory=not use_cpu,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        accelerator_config={"dispatch_batches": False, "even_batches": False},
        logging_strategy="steps",
        logging_steps=recipe.log_every_steps,
        logging_nan_inf_filter=False,
        eval_steps=recipe.validate_every_steps,
        save_strategy="steps" if save else "no",
        save_steps=recipe.save_every_steps,
        save_total_limit=recipe.keep_checkpoints,
        report_to=["tensorboard"] if tensorboard else [],
        disable_tqdm=True,
    )


class TrainingRows(Protocol):
    """Rows of a run; each step has `passes_per_step` micro-batches per process."""

    @property
    def rows(self) -> Dataset[PackedTree]:
        """Rows of all steps in order."""

    @property
    def passes_per_step(self) -> int:
        """Forward passes of each process per step."""


class TreeTrainer(Trainer):
    """Trainer whose loss is the mean over all targets of a step's whole batch.

    With `validate` it validates as often as the recipe says.
    """

    # A micro-batch's sum is divided by the targets of the whole step, over all processes.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: Module,
        arguments: TrainingArguments,
        recipe: TrainingRecipe,
        *,
        collator: Callable[[Sequence[PackedTree]], Batch],
        train_rows: TrainingRows,
        validation_rows: RowList | None = None,
        validate: bool = False,
        on_step: OnStep | None = None,
    ) -> None:
        arguments.eval_strategy = IntervalStrategy.STEPS if validate else IntervalStrategy.NO
        arguments.gradient_accumulation_steps = train_rows.passes_per_step
        super().__init__(
            model=model,
            args=arguments,
            data_collator=collator,
            train_dataset=train_rows.rows,
            eval_dataset=validation_rows,
        )
        self.recipe = recipe
        self.on_step = on_step
        self.progress = _Progress()
        self.last_validation_loss: float | None = None
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: Module | None = None) -> Optimizer:
        """Build the recipe's optimizer."""
        if self.optimizer is None:
            if self.is_fsdp_enabled and self.recipe.muon is not None:
                raise TrainingError("muon does not support sharded matrices: train without FSDP")
            trained = self.model if model is None else model
            assert trained is not None
            self.optimizer = build_optimizer(trained, self.recipe)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LambdaLR:
        """Build the recipe's learning rate schedule."""
        if self.lr_scheduler is None:
            schedule, total = self.recipe.schedule, self.recipe.num_steps
            stepped = self.optimizer if optimizer is None else optimizer
            assert stepped is not None
            self.lr_scheduler = LambdaLR(stepped, lambda step: rate_factor(step, total, schedule))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """Take the micro-batches of a step, and count the targets of all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        trees = [tree_batch(batch) for batch in batches]
        counts = torch.tensor(
            [
                sum(self.count_targets(batch) for batch in batches),
                sum(batch.num_trees for batch in trees),
                sum(int(batch.holds_token_BT.sum()) for batch in trees),
                sum(batch.token_ids_BT.numel() for batch in trees),
            ],
            device=device,
        )
        total = self.accelerator.reduce(counts, "sum")
        self.progress.num_targets += int(total[0])
        self.progress.num_trees += int(total[1])
        self.progress.num_tokens += int(total[2])
        self.progress.num_processed_tokens += int(total[3])
        return batches, total[0]

    def get_eval_dataloader(
        self, eval_dataset: str | Dataset[PackedTree] | None = None
    ) -> DataLoader[Batch]:
        """Return the validation batches, the same number for each process.

        If a process had one batch less, it would miss a collective operation: the others would hang
        or exchange wrong data.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        assert isinstance(rows, RowList)
        at_once = self.args.eval_batch_size * self.args.world_size
        loader: DataLoader[Batch] = super().get_eval_dataloader(rows.padded(at_once))
        return loader

    def count_targets(self, batch: Batch) -> int:
        """Return the number of targets in a micro-batch."""
        return int((batch["targets_BT"] != IGNORED_TARGET).sum())

    def summed_loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the loss summed over the targets of a micro-batch."""
        inner = self.accelerator.unwrap_model(model)
        base = inner if isinstance(inner, PreTrainedModel) else inner.get_base_model()
        return summed_tree_loss(model, tree_batch(batch), base)

    def compute_loss(
        self,
        model: Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the micro-batch's contribution to the step's mean loss."""
        loss = self.summed_loss(model, inputs)
        count = self.count_targets(inputs) if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, so each contribution is scaled up.
        scale = 1 if num_items_in_batch is None else self.accelerator.num_processes
        return loss / count * scale

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the mean loss over all targets of the validation trees."""
        assert self.model is not None
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for inputs in self.get_eval_dataloader(eval_dataset):
            prepared = self._prepare_inputs(inputs)
            sums[0] += self.summed_loss(self.model_wrapped, prepared).double()
            sums[1] += self.count_targets(prepared)
        total = self.accelerator.reduce(sums, "sum")
        loss = float(total[0] / total[1].clamp(min=1))
        self.last_validation_loss = loss
        metrics = {f"{metric_key_prefix}_loss": loss}
        self.log(dict(metrics))
        # Validation does not count as training time.
        self.progress.started = time.perf_counter()
        return metrics

    def final_validation_loss(self) -> float:
        """Return the validation loss of the current weights; validate if the last step did not."""
        if self.last_validation_loss is None:
            self.evaluate()
        assert self.last_validation_loss is not None
        return self.last_validation_loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add throughput to the logs, and report the steps since the last report."""
        if "loss" in logs:
            report = self._report(logs)
            logs["learned_tokens_per_s"] = report.learned_tokens_per_s
            logs["trees_per_s"] = report.trees_per_s
            logs["padding_share"] = report.padding_share
            if self.on_step is not None and self.is_world_process_zero():
                self.on_step(report)
            self.progress = _Progress()
            self.last_validation_loss = None
        super().log(logs, start_time)

    def _report(self, logs: dict[str, float]) -> StepReport:
        return StepReport(
            step=self.state.global_step,
            num_steps=self.state.max_steps,
            loss=logs["loss"],
            num_targets=self.progress.num_targets,
            num_trees=self.progress.num_trees,
            padding_share=1 - self.progress.num_tokens / self.progress.num_processed_tokens,
            seconds=time.perf_counter() - self.progress.started,
            learning_rate=logs["learning_rate"],
            validation_loss=self.last_validation_loss,
        )
