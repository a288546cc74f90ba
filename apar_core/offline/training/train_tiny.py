"""Training of the embedded models on their corpus, on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import Module
from torch.utils.data import IterableDataset
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from apar_core.errors import TrainingError
from apar_core.file_modes import share_weights
from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.data.tiny_corpus.generator import (
    BROAD_WEIGHTS,
    FINISHING_WEIGHTS,
    JOINING_WEIGHTS,
    POLISHING_WEIGHTS,
    SETTLING_WEIGHTS,
    Corpus,
    KindWeights,
    vocabulary_texts,
)
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.joined_encoder import MARKER_TOKENS, JoinedEncoder
from apar_core.offline.training.packing import PackedTree, join_trees
from apar_core.offline.training.pretrained import add_tokens, load_tokenizer, pad_token_id
from apar_core.offline.training.recipe import (
    TinyModelSettings,
    TinyTrainingSettings,
    TrainingPhase,
    TrainingRecipe,
    load_recipe,
)
from apar_core.offline.training.tree_trainer import (
    OnStep,
    StepReport,
    TreeCollator,
    TreeTrainer,
    training_arguments,
)

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
FORK, CHILD = "[Fork]", "[Child]"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, BOS, EOS, FORK, CHILD, *ROLES)
_CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# Batches that are drawn at once and sorted, so that a batch has rows of similar length.
_BATCHES_PER_DRAW = 20

MIXTURES = {
    "broad": BROAD_WEIGHTS,
    "finishing": FINISHING_WEIGHTS,
    "polishing": POLISHING_WEIGHTS,
    "settling": SETTLING_WEIGHTS,
    "joining": JOINING_WEIGHTS,
}


def tiny_recipe(name_or_file: str = "apar-tiny") -> TinyTrainingSettings:
    """Load a recipe of the embedded model by name or file."""
    return load_recipe(name_or_file, TinyTrainingSettings)


def train_tokenizer(
    texts: Iterable[str], *, vocabulary_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocabulary_size` entries.

    The entries include the special tokens: control tokens and chat roles. The same texts in the
    same order give the same tokenizer. Decoding concatenated pieces gives their concatenated texts.
    """
    tokenizer = Tokenizer(models.BPE())
    # Single digits, so "12 + 7" and the numbers of a list share tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[FORK, CHILD, *ROLES],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=_CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )


def build_tiny_model(
    settings: TinyModelSettings, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Return a float32 model, initialized by torch's global generator."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_key_value_heads,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def save_checkpoint(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write the model (bfloat16), tokenizer and generation settings."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.config.use_cache = True
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    share_weights(folder / "config.json")


@dataclass
class WeightAverage:
    """Weighted average of model weights; the shares need not sum to one."""

    total_share: float = 0.0
    _sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, model: Module, share: float) -> None:
        """Add the model's current weights with this share."""
        if share == 0:
            return
        self.total_share += share
        for name, parameter in model.named_parameters():
            counted = share * parameter.detach()
            self._sums[name] = self._sums[name] + counted if name in self._sums else counted

    def apply(self, model: Module) -> None:
        """Set the model's weights to the average; do nothing if no weights were added."""
        if not self._sums:
            return
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._sums[name] / self.total_share)


class PacksExamples(Protocol):
    """Encoder of examples as packed rows."""

    def pack(self, example: ExampleRecord) -> PackedTree:
        """Return the example as one row of any length."""


@dataclass(frozen=True)
class CorpusTrees(IterableDataset[PackedTree]):
    """Trees of a phase in the order of its steps, with similar lengths in a batch."""

    kind_weights: KindWeights
    stream: str
    seed: int
    recipe: TrainingRecipe
    encoder: PacksExamples
    num_processes: int

    def __post_init__(self) -> None:
        if self.recipe.batch_unit != "trees":
            raise TrainingError("batch_unit: steps of the embedded model count trees")

    @property
    def rows(self) -> CorpusTrees:
        """The rows: one tree each."""
        return self

    @property
    def passes_per_step(self) -> int:
        """Forward passes of each process per step."""
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
    encoder: PacksExamples,
    pad_id: int,
    phase: TrainingPhase,
    seed: int,
    on_step: OnStep,
) -> None:
    """Train one phase on the CPU."""
    # The Trainer requires a folder, although nothing is saved between phases.
    with TemporaryDirectory() as folder:
        arguments = training_arguments(
            phase.recipe, Path(folder), tensorboard=False, save=False, use_cpu=True
        )
        trainer = TreeTrainer(
            model,
            arguments,
            phase.recipe,
            collator=TreeCollator.for_model(model, pad_id),
            train_rows=CorpusTrees(
                MIXTURES[phase.mixture],
                phase.stream,
                seed,
                phase.recipe,
                encoder,
                arguments.world_size,
            ),
            on_step=on_step,
        )
        trainer.train()


def _round_weights(model: LlamaForCausalLM) -> None:
    """Round all weights to bfloat16, so a phase could also start from a saved checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def train_tiny(
    out: Path,
    model_settings: TinyModelSettings,
    training_settings: TinyTrainingSettings,
    on_step: OnStep,
) -> None:
    """Train the embedded model and write its checkpoint to `out`.

    The weights are reproducible with the same settings, libraries and processor.
    """
    torch.set_num_threads(training_settings.num_executors)
    torch.manual_seed(training_settings.seed)
    tokenizer = train_tokenizer(
        vocabulary_texts(training_settings.seed),
        vocabulary_size=model_settings.vocabulary_size,
        max_length=model_settings.max_positions,
    )
    model = build_tiny_model(model_settings, tokenizer)
    encoder = ExampleEncoder(tokenizer, model_settings.max_positions)
    _train_phases(model, lambda _: encoder, pad_token_id(tokenizer), training_settings, on_step)
    save_checkpoint(model.eval(), tokenizer, out)


def train_tiny_joins(
    out: Path, training_settings: TinyTrainingSettings, on_step: OnStep, *, checkpoint: Path
) -> None:
    """Train a copy of an embedded model to write answers that join, in ThreadWeaver's grammar.

    The tokens of ThreadWeaver replace the checkpoint's control tokens. The weights are reproducible
    with the same checkpoint, settings, libraries and processor.
    """
    torch.set_num_threads(training_settings.num_executors)
    torch.manual_seed(training_settings.seed)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = add_tokens(
        model, load_tokenizer(str(checkpoint)), MARKER_TOKENS, multiple=1,
        seed=training_settings.seed,
    )  # fmt: skip
    model.config.use_cache = False

    def encoder(phase: TrainingPhase) -> JoinedEncoder:
        return JoinedEncoder(
            tokenizer,
            training_settings.model.max_positions,
            start_share=phase.start_share,
            seed=training_settings.seed,
        )

    _train_phases(model, encoder, pad_token_id(tokenizer), training_settings, on_step)
    save_checkpoint(model.eval(), tokenizer, out)


def _train_phases(
    model: LlamaForCausalLM,
    encoder_for: Callable[[TrainingPhase], PacksExamples],
    pad_id: int,
    settings: TinyTrainingSettings,
    on_step: OnStep,
) -> None:
    """Train all phases; the model gets the average of their results."""
    average = WeightAverage()
    steps_before = 0
    for phase in settings.phases:

        def report(step: StepReport, before: int = steps_before) -> None:
            on_step(replace(step, step=before + step.step, num_steps=settings.num_steps))

        train_phase(model, encoder_for(phase), pad_id, phase, settings.seed, report)
        steps_before += phase.recipe.num_steps
        _round_weights(model)
        average.add(model, phase.average_share)
    average.apply(model)
