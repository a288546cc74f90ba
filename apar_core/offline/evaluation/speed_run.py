"""Generating, replaying or counting all answers of an evaluation, each kept when done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from apar_core.errors import EvaluationError, RequestError
from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.data.structure import extract_tree
from apar_core.offline.decoders.interface import (
    AnswerDecoder,
    DecodeLimits,
    TokenChoice,
    decode_answer,
)
from apar_core.offline.decoders.load import load_decoder
from apar_core.offline.evaluation.answer_files import RecordedAnswer
from apar_core.offline.evaluation.measurement import (
    COUNT,
    AnswerKey,
    AnswerStore,
    counted,
    measured,
)
from apar_core.offline.evaluation.prompt_sets import Question
from apar_core.offline.evaluation.replay_text import ModelText, load_text
from apar_core.offline.evaluation.replay_tree import thread_scripts, token_tree
from apar_core.tree.restore import restore

DECODERS = ("plain", "vanilla_apar", "medusa_apar")


class SpeedSettings(BaseModel):
    """What is measured, and on what.

    `model` is a folder or hub name and `model_name` what readers know it by. `baseline_model` is
    the baseline's checkpoint; None shares that of `model`. With `replay` the tokens of recorded
    answers are forced, through a checkpoint, through `random_weights`, or with `count_only` through
    the schedule alone; `tokenizer` is for the last two.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    model_name: str
    decoders: tuple[str, ...] = ("vanilla_apar",)
    baseline: str | None = "plain"
    baseline_model: str | None = None
    baseline_model_name: str | None = None
    prompts: str = "vicuna-bench"
    replay: tuple[Path, ...] = ()
    count_only: bool = False
    random_weights: str | None = None
    tokenizer: str | None = None
    medusa_heads: Path | None = None
    questions: Path | None = None
    limit: PositiveInt | None = None
    max_tokens: PositiveInt = 1024
    device: str = "auto"
    dtype: str = "auto"

    @property
    def runs_checkpoint(self) -> bool:
        """Whether the checkpoint of `model` is loaded."""
        return not self.count_only and self.random_weights is None

    @property
    def baseline_name(self) -> str | None:
        """The name that the baseline's answers are kept with."""
        if self.baseline is None or self.baseline_model is None:
            return self.baseline
        return f"{self.baseline} of {self.baseline_model_name or self.baseline_model}"

    @property
    def repeats_text(self) -> bool:
        """Whether the baseline is forced to the text of the first decoder."""
        return self.baseline == "plain" and self.baseline_model is None

    @property
    def subject(self) -> str:
        """What is measured, in words for a reader."""
        if self.count_only:
            return "the paper's schedule, counted without a model"
        if self.random_weights is not None:
            return f"random weights of {self.random_weights}"
        return self.model_name

    def as_facts(self) -> dict[str, str]:
        """Return what has to be the same when a run goes on."""
        facts = self.model_dump(
            mode="json", exclude={"limit", "questions", "model", "baseline_model"}
        )
        return {name: str(value) for name, value in facts.items()}


def check_settings(settings: SpeedSettings) -> None:
    """Raise EvaluationError, naming the options, for combinations that are refused."""
    named = [("--decoder", name) for name in settings.decoders]
    for option, name in [*named, ("--against", settings.baseline)]:
        if name is not None and name not in DECODERS:
            raise EvaluationError(f"{option} {name!r} is none of {', '.join(DECODERS)}")
    if len({*settings.decoders, settings.baseline_name}) <= len(settings.decoders):
        raise EvaluationError("--decoder and --against name the same decoder twice")
    if settings.baseline_model is not None:
        if settings.baseline not in ("plain", "vanilla_apar"):
            raise EvaluationError(
                "--against-model needs --against plain or vanilla_apar, not "
                f"{settings.baseline or 'none'}"
            )
        if not settings.runs_checkpoint:
            raise EvaluationError("--against-model is compared with a checkpoint: give --model")
    for option, wanted in (
        ("--count-only", settings.count_only),
        ("--random-weights", settings.random_weights is not None),
    ):
        if wanted and not settings.replay:
            raise EvaluationError(f"{option} needs answers to --replay")
    if settings.count_only and settings.random_weights is not None:
        raise EvaluationError("--count-only runs no model: leave --random-weights out")
    if settings.tokenizer is not None and settings.runs_checkpoint:
        raise EvaluationError("--tokenizer is the checkpoint's own: leave it out")
    heads_needed = "medusa_apar" in (*settings.decoders, settings.baseline)
    if heads_needed and not settings.count_only and settings.medusa_heads is None:
        raise EvaluationError("medusa_apar needs --medusa-heads FOLDER")
    for path in settings.replay:
        if not path.is_file():
            raise EvaluationError(f"--replay {path}: no such file")


@dataclass(frozen=True, slots=True)
class _Dimensions:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int


_DIMENSIONS = {
    "tiny": _Dimensions(hidden=64, intermediate=160, layers=2, heads=4, positions=8192),
    # LLaMA (arXiv 2302.13971), table 2, with room for long replays.
    "llama-7b": _Dimensions(hidden=4096, intermediate=11008, layers=32, heads=32, positions=4096),
    "llama-13b": _Dimensions(hidden=5120, intermediate=13824, layers=40, heads=40, positions=4096),
}
PRESETS = tuple(_DIMENSIONS)


def random_model(
    preset_or_config: str, *, vocabulary_size: int, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Return an untrained causal language model on its device, ready to decode.

    Its vocabulary has at least `vocabulary_size` entries. Raises EvaluationError for a name that
    is neither a preset nor a configuration file (or its folder) of transformers.
    """
    config = _config(preset_or_config)
    config.vocab_size = max(vocabulary_size, getattr(config, "vocab_size", 0))
    # Drawn where they will stay: 7 billion weights take minutes on a CPU.
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()  # type: ignore[no-any-return]


def _config(preset_or_config: str) -> PretrainedConfig:
    if preset_or_config in _DIMENSIONS:
        dimensions = _DIMENSIONS[preset_or_config]
        return LlamaConfig(
            vocab_size=1,
            # Ids that LlamaConfig would otherwise check against one entry.
            bos_token_id=None,
            eos_token_id=None,
            hidden_size=dimensions.hidden,
            intermediate_size=dimensions.intermediate,
            num_hidden_layers=dimensions.layers,
            num_attention_heads=dimensions.heads,
            num_key_value_heads=dimensions.heads,
            max_position_embeddings=dimensions.positions,
        )
    if not Path(preset_or_config).exists():
        raise EvaluationError(
            f"{preset_or_config!r} is neither {', '.join(PRESETS)} nor a configuration file"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(preset_or_config)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{preset_or_config}: {str(error).splitlines()[0]}") from error
    return config


_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class NamedDecoder:
    """A decoder of a kind (as in `load_decoder`) under the name that its answers are kept with.

    `text` has the tokens of its model.
    """

    name: str
    kind: str
    decoder: AnswerDecoder
    text: ModelText


@dataclass(frozen=True, slots=True)
class Decoders:
    """Decoders that are measured, and the one that they are compared with.

    `repeats_text` tells whether the baseline is forced to the text of the first decoder.
    """

    measured: tuple[NamedDecoder, ...]
    baseline: NamedDecoder | None = None
    repeats_text: bool = False

    def in_turn(self, number: int) -> list[NamedDecoder]:
        """Return all of them; the order alternates with `number`, so that none gains by it."""
        decoders = [*self.measured, *([] if self.baseline is None else [self.baseline])]
        return decoders if number % 2 == 0 else decoders[::-1]


def choose_device(wanted: str) -> str:
    """Return the device to run on; "auto" takes a CUDA GPU where there is one."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise EvaluationError(f"--device {wanted}: this machine has no CUDA GPU")
    return wanted


def choose_dtype(wanted: str, device: str) -> torch.dtype:
    """Return the dtype to run in; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    if wanted == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if wanted not in _DTYPES:
        raise EvaluationError(f"--dtype {wanted!r} is none of auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]


def load_decoders(settings: SpeedSettings, text: ModelText) -> Decoders:
    """Return the decoders. Decoders of the same checkpoint share one loaded model.

    Raises EvaluationError if a model cannot be loaded.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)

    def build(name: str, kind: str, model: PreTrainedModel, text: ModelText) -> NamedDecoder:
        heads = settings.medusa_heads if kind == "medusa_apar" else None
        decoder = load_decoder(
            kind, model, text.tokenizer, medusa_heads=heads, device=device, dtype=dtype
        )
        return NamedDecoder(name, kind, decoder, text)

    model = _model(settings, text, dtype, device)
    measured = tuple(build(kind, kind, model, text) for kind in settings.decoders)
    if settings.baseline is None or settings.baseline_name is None:
        return Decoders(measured)
    if settings.baseline_model is not None:
        model, text = (
            _checkpoint(settings.baseline_model, dtype, device),
            load_text(settings.baseline_model),
        )
    baseline = build(settings.baseline_name, settings.baseline, model, text)
    return Decoders(measured, baseline, settings.repeats_text)


def _model(
    settings: SpeedSettings, text: ModelText, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    if settings.random_weights is not None:
        return random_model(
            settings.random_weights,
            vocabulary_size=text.vocabulary_size,
            dtype=dtype,
            device=device,
        )
    return _checkpoint(settings.model, dtype, device)


def _checkpoint(name_or_path: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"no model in {name_or_path!r}: {reason}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


Show = Callable[[], None]

_WARM_UP = chain([("Why?", ParagraphRecord(" Because."))], closing=" So.")


def warm_up(decoders: Decoders) -> None:
    """Let each decoder fork once, so that the first answer does not pay for what is built once."""
    for each in decoders.in_turn(0):
        prompt_ids = each.text.encode_prompt("Hello")
        decode_answer(each.decoder, prompt_ids, TokenChoice.replay(_scripts(_WARM_UP, each)))


@dataclass(frozen=True, slots=True)
class AnsweredKeys:
    """Which answers every decoder has given, and why others had to be left out."""

    keys: list[AnswerKey]
    left_out: list[str]


def generate_answers(
    decoders: Decoders,
    questions: Sequence[Question],
    store: AnswerStore,
    limits: DecodeLimits,
    show: Show,
) -> AnsweredKeys:
    """Let the decoders answer all turns greedily, side by side.

    A later turn's prompt holds the decoder's own earlier answers. Plain decoding of the same model
    as the baseline is forced to the text of the first decoder: left to itself, a model that has
    learned to fork ends its answers early where it may not. `show` is called once a question.
    """
    done = AnsweredKeys([], [])
    for question in questions:
        keys = [
            AnswerKey(question.question_id, turn + 1, question.category)
            for turn in range(len(question.turns))
        ]
        try:
            _answer_question(decoders, question, store, limits)
            done.keys.extend(keys)
        except RequestError as error:
            done.left_out.append(f"question {question.question_id}: {error}")
        show()
    return done


def replay_answers(
    decoders: Decoders,
    answers: Sequence[RecordedAnswer],
    store: AnswerStore,
    show: Show,
) -> AnsweredKeys:
    """Force the answers' trees through the decoders, and their flat texts through plain."""
    done = AnsweredKeys([], [])
    for number, answer in enumerate(answers):
        try:
            _replay(decoders, answer, number, store)
            done.keys.append(_key(answer))
        except RequestError as error:
            done.left_out.append(f"question {answer.question_id}, turn {answer.turn}: {error}")
        show()
    return done


def _replay(decoders: Decoders, answer: RecordedAnswer, number: int, store: AnswerStore) -> None:
    tree = extract_tree(answer.text).tree
    for each in decoders.in_turn(number):
        if store.find(answer.question_id, answer.turn, each.name) is not None:
            continue
        scripts = _scripts(tree, each)
        limits = DecodeLimits(
            max_tokens=max(1, sum(map(len, scripts.values()))),
            max_threads=max(1, len(scripts)),
            max_forks=max(1, len(scripts)),
        )
        prompt_ids = each.text.encode_chat(answer.messages)
        decoded = decode_answer(each.decoder, prompt_ids, TokenChoice.replay(scripts), limits)
        store.add(measured(_key(answer), each.name, decoded, answer.text))


def count_answers(
    text: ModelText, answers: Sequence[RecordedAnswer], store: AnswerStore, show: Show
) -> AnsweredKeys:
    """Follow the schedule of the answers' trees without any model."""
    keys = [_key(answer) for answer in answers]
    for key, answer in zip(keys, answers, strict=True):
        if store.find(key.question_id, key.turn, COUNT) is None:
            tree = token_tree(extract_tree(answer.text).tree, text.encode)
            num_prompt_tokens = len(text.encode_chat(answer.messages))
            store.add(counted(key, tree, num_prompt_tokens, answer.text))
        show()
    return AnsweredKeys(keys, [])


def _scripts(answer: ParagraphRecord, decoder: NamedDecoder) -> dict[str, list[int]]:
    tree = token_tree(answer, decoder.text.encode)
    # One thread takes no fork tokens: it gets the same text in reading order.
    if decoder.kind == PLAIN:
        return {"": [*restore(tree), decoder.text.end_id]}
    return thread_scripts(tree, decoder.text.tokens)


def _key(answer: RecordedAnswer) -> AnswerKey:
    return AnswerKey(answer.question_id, answer.turn, answer.category)


def _answer_question(
    decoders: Decoders, question: Question, store: AnswerStore, limits: DecodeLimits
) -> None:
    answers = [_answer_turns(each, question, store, limits) for each in decoders.measured]
    if decoders.baseline is not None and decoders.repeats_text:
        _repeat_turns(decoders.baseline, question, store, answers[0])
    elif decoders.baseline is not None:
        _answer_turns(decoders.baseline, question, store, limits)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    token_ids: list[int]
    ended: bool


def _answer_turns(
    decoder: NamedDecoder, question: Question, store: AnswerStore, limits: DecodeLimits
) -> list[_Answer]:
    """Return the answer of each turn; those that an earlier run has left are encoded again."""
    answers: list[_Answer] = []
    text = decoder.text
    for turn in range(len(question.turns)):
        known = store.find(question.question_id, turn + 1, decoder.name)
        if known is None:
            prompt_ids = _prompt_ids(text, question, turn, [answer.text for answer in answers])
            decoded = decode_answer(decoder.decoder, prompt_ids, TokenChoice.greedy(), limits)
            token_ids = decoded.text_ids
            key = AnswerKey(question.question_id, turn + 1, question.category)
            known = measured(key, decoder.name, decoded, text.decode(token_ids))
            store.add(known)
        else:
            token_ids = text.encode(known.text)
        answers.append(_Answer(known.text, token_ids, known.ended))
    return answers


def _repeat_turns(
    plain: NamedDecoder, question: Question, store: AnswerStore, answers: Sequence[_Answer]
) -> None:
    """Force another decoder's answers through plain decoding of the same model."""
    text = plain.text
    for turn, answer in enumerate(answers):
        if store.find(question.question_id, turn + 1, plain.name) is not None:
            continue
        prompt_ids = _prompt_ids(text, question, turn, [other.text for other in answers[:turn]])
        script = [*answer.token_ids, *([text.end_id] if answer.ended else [])]
        choice = TokenChoice.replay({"": script})
        limits = DecodeLimits(max_tokens=len(script))
        decoded = decode_answer(plain.decoder, prompt_ids, choice, limits)
        key = AnswerKey(question.question_id, turn + 1, question.category)
        store.add(measured(key, plain.name, decoded, answer.text))


def _prompt_ids(text: ModelText, question: Question, turn: int, texts: Sequence[str]) -> list[int]:
    if question.raw_prompt:
        return text.encode_prompt(question.turns[turn])
    return text.encode_chat(question.messages(turn, tuple(texts)))
