"""Fine-tuning of causal language models to fork, and resumption of interrupted runs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils.hub import cached_file

from apar_core.checkpoint_folder import ADAPTER_FOLDER
from apar_core.errors import TrainingError
from apar_core.offline.data.example_file import example_files, read_examples
from apar_core.offline.data.records import ExampleRecord, count_forks
from apar_core.offline.training.adapter import base_with_trained_rows, save_adapter
from apar_core.offline.training.chat_format import turn_end_id
from apar_core.offline.training.example_encoder import EncodingCounts, ExampleEncoder
from apar_core.offline.training.pretrained import (
    CONTROL_TOKENS,
    add_tokens,
    check_model,
    is_sharded,
    load_model,
    load_tokenizer,
    pad_token_id,
    prepare_weights,
    recipe_dtype,
    save_pretrained,
    stop_at,
)
from apar_core.offline.training.recipe import LoraSettings, TrainingRecipe
from apar_core.offline.training.trained_formats import TRAINED_FORMATS
from apar_core.offline.training.tree_dataset import (
    RowList,
    StepRows,
    TreeGroups,
    drawn_trees,
    padding_share,
    rows_of,
    step_rows,
)
from apar_core.offline.training.tree_trainer import (
    CHECKPOINTS,
    OnStep,
    TreeCollator,
    TreeTrainer,
    training_arguments,
)

logger = logging.getLogger(__name__)
_RECIPE_FILE = "recipe.json"
_INPUTS_FILE = "inputs.json"
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin")

# Fields that may change when a run is resumed: they do not affect what it learns.
_FREE_FIELDS = {
    "micro_batch_size",
    "pack_trees",
    "gradient_checkpointing",
    "validate_every_steps",
    "save_every_steps",
    "keep_checkpoints",
    "log_every_steps",
    "num_loaders",
    "num_measured",
    "measured_tokens",
}

Inputs = Mapping[str, str]
"""SHA-256 digests of model, tokenizer, chat template and data; name of the format."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Share of padding among all tokens of a run, and the share with one tree per row."""

    share: float
    one_tree_per_row: float

    def __str__(self) -> str:
        return (
            f"padding {self.share:.1%} of the tokens, {self.one_tree_per_row:.1%} with one tree "
            "per row"
        )


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows of a run."""

    training: StepRows
    validation: RowList
    padding: Padding


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Outcome of a run."""

    counts: EncodingCounts
    padding: Padding
    num_validation: int
    validation_loss: float | None


def fine_tune(
    model_name: str,
    data: Path,
    out: Path,
    recipe: TrainingRecipe,
    *,
    format_name: str = CONTROL_TOKENS.name,
    chat_template: Path | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
) -> TrainingResult:
    """Train a model on the examples in `data` and write a checkpoint to `out`.

    `format_name` is one of `TRAINED_FORMATS`. `apar serve` can load the checkpoint: adapters are
    merged unless the recipe keeps them separate, and the tokenizer has the format's tokens and a
    chat template. Raises TrainingError or DataError for invalid inputs.
    """
    trained_format = TRAINED_FORMATS[format_name]
    tokenizer = load_tokenizer(model_name, chat_template)
    inputs = {**run_inputs(model_name, tokenizer, data), "format": format_name}
    last = last_checkpoint(out, recipe, inputs, resume=resume)
    check_model(model_name, recipe.context_length)
    arguments = training_arguments(recipe, out, tensorboard=True, save=True)
    if recipe.lora is not None and is_sharded():
        raise TrainingError("lora cannot be merged into a sharded model: train without FSDP")
    model = load_model(model_name, recipe_dtype(recipe), arguments.device)
    tokenizer = add_tokens(
        model,
        tokenizer,
        trained_format.tokens,
        multiple=recipe.vocabulary_multiple,
        seed=recipe.seed,
    )
    stop_at(model, tokenizer, turn_end_id(tokenizer))
    encoder = trained_format.encoder(tokenizer, recipe.context_length)
    training, validation = read_groups(data, encoder).split(recipe.validation_share, recipe.seed)
    collator = TreeCollator.for_model(model, pad_token_id(tokenizer))
    plan = plan_rows(training, validation, recipe, arguments.world_size, collator.multiple)
    token_ids = trained_format.tokens.ids(tokenizer.get_vocab())
    # The Trainer does so too late for the first weights of adapters.
    torch.manual_seed(recipe.seed)
    trained = model if recipe.lora is None else adapted(model, recipe.lora, token_ids)
    prepare_weights(trained)
    trainer = TreeTrainer(
        trained,
        arguments,
        recipe,
        collator=collator,
        train_rows=plan.training,
        validation_rows=plan.validation,
        validate=bool(validation.all_rows),
        on_step=on_step,
    )
    train_from(last, trainer, out, inputs)
    loss = trainer.final_validation_loss() if validation.all_rows else None
    _save(trainer, tokenizer, out, forks=bool(token_ids))
    return TrainingResult(encoder.counts, plan.padding, len(validation.all_rows), loss)


def read_groups(data: Path, encoder: ExampleEncoder) -> TreeGroups:
    """Encode the examples of a file or folder.

    Raises TrainingError if no example fits the context.
    """
    structured: list[ExampleRecord] = []
    unstructured: list[ExampleRecord] = []
    for example in read_examples(data):
        (structured if count_forks(example.answer) else unstructured).append(example)
    groups = TreeGroups(encoder.encode_all(structured), encoder.encode_all(unstructured))
    logger.info("%s", encoder.counts)
    if encoder.counts.cut or encoder.counts.dropped:
        logger.warning(
            "%d examples longer than %d tokens were cut at a thread, %d were dropped",
            encoder.counts.cut,
            encoder.context_length,
            encoder.counts.dropped,
        )
    if not groups.all_rows:
        raise TrainingError(
            f"no example in {data} fits {encoder.context_length} tokens ({encoder.counts})"
        )
    return groups


def plan_rows(
    training: TreeGroups,
    validation: TreeGroups,
    recipe: TrainingRecipe,
    num_processes: int,
    multiple: int,
) -> RowPlan:
    """Draw the trees of a run and assign them to rows, padded to a `multiple` of tokens."""
    steps = drawn_trees(training, recipe)
    alone = recipe.model_copy(update={"pack_trees": False})
    rows = step_rows(steps, recipe, num_processes)
    padding = Padding(
        padding_share(rows.rows, recipe, multiple),
        padding_share(step_rows(steps, alone, num_processes).rows, alone, multiple),
    )
    logger.info("%s", padding)
    return RowPlan(rows, RowList(rows_of(validation.all_rows, recipe)), padding)


def adapted(model: PreTrainedModel, lora: LoraSettings, token_ids: Sequence[int]) -> PeftModel:
    """Return the model with adapters; of the embeddings, only these tokens' rows train."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    names = {
        name: list(token_ids)
        for name, module in model.named_modules()
        if module is model.get_input_embeddings()
        or (module is model.get_output_embeddings() and not tied)
    }
    targets = lora.target_modules
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        trainable_token_indices={name.rpartition(".")[2]: ids for name, ids in names.items()}
        if token_ids
        else None,
    )
    return get_peft_model(model, config)


def _save(
    trainer: TreeTrainer, tokenizer: PreTrainedTokenizerBase, out: Path, *, forks: bool
) -> None:
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.is_world_process_zero():
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, PeftModel):
        lora = trainer.recipe.lora
        # A server gives an adapter only requests that may fork.
        if forks and lora is not None and not lora.merge:
            save_adapter(model, out / ADAPTER_FOLDER)
            model = base_with_trained_rows(model)
        else:
            model = model.merge_and_unload()
        weights = model.state_dict()
    save_pretrained(model, weights, tokenizer, out)


def run_inputs(model_name: str, tokenizer: PreTrainedTokenizerBase, data: Path) -> Inputs:
    """Return the digests of a run's inputs. Files count by name and content, not by location.

    `tokenizer` must have its final chat template. Raises DataError if there is no data.
    """
    template = tokenizer.chat_template
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return {
        "model": _model_sum(model_name),
        "tokenizer": _sum_of_text(json.dumps([type(tokenizer).__name__, vocabulary])),
        "chat template": _sum_of_text(json.dumps(template, sort_keys=True)),
        "data": _sum_of_files(example_files(data)),
    }


def last_checkpoint(
    out: Path, recipe: TrainingRecipe, inputs: Inputs, *, resume: bool
) -> str | None:
    """Return the newest complete checkpoint to resume from, or None for a new run.

    Raises TrainingError for a resumed run without a checkpoint or with another recipe or inputs.
    Raises it for a new run that would mix with old checkpoints or overwrite a model.
    """
    folder = out / CHECKPOINTS
    whole = [path for path in folder.glob("checkpoint-*") if _is_whole(path)]
    if resume and not whole:
        raise TrainingError(f"nothing to resume: {folder} has no complete checkpoint")
    if not resume and whole:
        raise TrainingError(
            f"{folder} has checkpoints of an earlier run: resume it, or choose another folder"
        )
    if not resume:
        if (out / "config.json").exists():
            raise TrainingError(f"{out} already has a model: choose another folder")
        return None
    _refuse_other_recipe(folder / _RECIPE_FILE, recipe)
    _refuse_other_inputs(folder / _INPUTS_FILE, inputs)
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2])))


def train_from(checkpoint: str | None, trainer: TreeTrainer, out: Path, inputs: Inputs) -> None:
    """Train from the checkpoint or from the start; record recipe and inputs for resumption."""
    if trainer.is_world_process_zero():
        record_run(out, trainer.recipe, inputs)
    trainer.train(resume_from_checkpoint=checkpoint)


def record_run(out: Path, recipe: TrainingRecipe, inputs: Inputs) -> None:
    """Record recipe and inputs for the check by `last_checkpoint`."""
    folder = out / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RECIPE_FILE).write_text(recipe.model_dump_json(indent=2) + "\n")
    (folder / _INPUTS_FILE).write_text(json.dumps(dict(inputs), indent=2) + "\n")


def _is_whole(checkpoint: Path) -> bool:
    # The Trainer writes its state last; without it the checkpoint is incomplete.
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return checkpoint.name.rpartition("-")[2].isdecimal()


def _refuse_other_recipe(recorded: Path, recipe: TrainingRecipe) -> None:
    if not recorded.is_file():
        return
    before: dict[str, Any] = json.loads(recorded.read_text())
    now: dict[str, Any] = recipe.model_dump(mode="json")
    changes = [
        f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if name not in _FREE_FIELDS and before.get(name) != now.get(name)
    ]
    if changes:
        raise TrainingError(
            f"the run in {recorded.parent} cannot be resumed with another recipe: "
            f"{', '.join(changes)}"
        )


def _refuse_other_inputs(recorded: Path, inputs: Inputs) -> None:
    if not recorded.is_file():
        return
    # Earlier versions knew one format and did not record it.
    before: dict[str, str] = {"format": CONTROL_TOKENS.name} | json.loads(recorded.read_text())
    changes = [
        f"the {name} has changed ({'' if name == 'format' else 'SHA-256 '}was {before[name][:12]}, "
        f"is {inputs[name][:12]})"
        for name in inputs
        if name in before and before[name] != inputs[name]
    ]
    if changes:
        raise TrainingError(
            f"the run in {recorded.parent} cannot be resumed with other inputs: "
            f"{', '.join(changes)}"
        )


def _model_sum(model_name: str) -> str:
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        # A hub name: the files are cached in a folder named after their commit.
        return _sum_of_text(Path(str(cached_file(model_name, "config.json"))).parent.name)
    files = {path for pattern in _MODEL_FILES for path in folder.glob(pattern)}
    return _sum_of_files(sorted(files, key=lambda path: path.name))


def _sum_of_files(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return total.hexdigest()


def _sum_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
