"""`apar evaluate speed`: decoders, and answers that are generated, replayed or counted.

Answers are stored as soon as they are measured, so an interrupted run can be resumed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from apar_core.errors import EvaluationError, RequestError
from apar_core.offline.causal_model import load_causal_model
from apar_core.offline.data.records import ParagraphRecord, chain, token_tree
from apar_core.offline.data.structure import extract_tree
from apar_core.offline.decoders.interface import (
    AnswerDecoder,
    DecodeLimits,
    TokenChoice,
    decode_answer,
)
from apar_core.offline.decoders.load import (
    DECODER_NAMES,
    HEADED,
    PROMPTED,
    SINGLE_THREAD,
    UNSPECULATED,
    load_decoder,
)
from apar_core.offline.decoders.pass_times import read_passes
from apar_core.offline.evaluation.answer_files import RecordedAnswer, read_answer_set
from apar_core.offline.evaluation.measurement import (
    COUNT,
    AnswerKey,
    AnswerMeasurement,
    counted,
    measured,
)
from apar_core.offline.evaluation.prompt_sets import Question, load_prompts
from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, ModelText, load_text
from apar_core.offline.evaluation.speed_report import SpeedRun, speed_report
from apar_core.reporting import LineStore, Report, ShowProgress, file_name
from apar_core.suggestions import did_you_mean
from apar_core.tree.restore import restore
from apar_core.tree.threads import thread_scripts

Item = TypeVar("Item", Question, RecordedAnswer)

PLAIN = "plain"

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Hidden size, intermediate size, layers, heads and positions.
_RANDOM_PRESETS = {
    "tiny": (64, 160, 2, 4, 8192),
    # LLaMA (arXiv 2302.13971), table 2, with room for long replays.
    "llama-7b": (4096, 11008, 32, 32, 4096),
    "llama-13b": (5120, 13824, 40, 40, 4096),
}

_WARM_UP = chain([("Why?", ParagraphRecord(" Because."))], closing=" So.")


class SpeedSettings(BaseModel):
    """Settings of a speed evaluation.

    `model` is a folder or hub name and `model_name` its name in reports. `baseline_model` is the
    checkpoint of the baseline; None means that of `model`. `replay` forces the tokens of recorded
    answers, using a checkpoint, a model of `random_weights`, or with `count_only` just the
    schedule. Only the latter two take a `tokenizer`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    model_name: str
    decoders: tuple[str, ...] = ("vanilla_apar",)
    baseline: str | None = PLAIN
    baseline_model: str | None = None
    baseline_model_name: str | None = None
    prompts: str = "vicuna-bench"
    replay: tuple[Path, ...] = ()
    count_only: bool = False
    random_weights: str | None = None
    tokenizer: str | None = None
    medusa_heads: Path | None = None
    prompt_tokens: Path | None = None
    pass_times: Path | None = None
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
        """Name under which the baseline's answers are stored."""
        if self.baseline is None or self.baseline_model is None:
            return self.baseline
        return f"{self.baseline} of {self.baseline_model_name or self.baseline_model}"

    @property
    def repeats_text(self) -> bool:
        """Whether the baseline is forced to generate the first decoder's text."""
        return self.baseline == PLAIN and self.baseline_model is None

    @property
    def subject(self) -> str:
        """Description of the measurement, for the report."""
        if self.count_only:
            return "the paper's schedule, counted without a model"
        if self.random_weights is not None:
            return f"random weights of {self.random_weights}"
        return self.model_name

    def as_facts(self) -> dict[str, str]:
        """Return the settings that must not change when a run is resumed."""
        facts = self.model_dump(
            mode="json", exclude={"limit", "questions", "model", "baseline_model"}
        )
        return {name: str(value) for name, value in facts.items()}


def check_settings(settings: SpeedSettings) -> None:
    """Raise EvaluationError, naming the options, for invalid combinations."""
    if (problem := next(_problems(settings), None)) is not None:
        raise EvaluationError(problem)


def _problems(settings: SpeedSettings) -> Iterator[str]:
    baseline, names = settings.baseline, [*settings.decoders, settings.baseline]
    options = [*("--decoders" for _ in settings.decoders), "--against"]
    for option, name in zip(options, names, strict=True):
        if name is not None and name not in DECODER_NAMES:
            known = ", ".join(DECODER_NAMES)
            yield f"{option} {name!r} is not one of {known}{did_you_mean(name, DECODER_NAMES)}"
    if len({*settings.decoders, settings.baseline_name}) <= len(settings.decoders):
        yield "--decoders and --against name the same decoder twice"
    if settings.baseline_model is not None:
        if baseline not in (PLAIN, "vanilla_apar"):
            yield f"--against-model needs --against plain or vanilla_apar, not {baseline or 'none'}"
        if not settings.runs_checkpoint:
            yield "--against-model is compared with a checkpoint: give --model"
    if settings.count_only and not settings.replay:
        yield "--count-only needs answers to --replay"
    if settings.random_weights is not None and not settings.replay:
        yield "--random-weights needs answers to --replay"
    if settings.count_only and settings.random_weights is not None:
        yield "--count-only runs no model: omit --random-weights"
    if settings.tokenizer is not None and settings.runs_checkpoint:
        yield "a checkpoint uses its own tokenizer: omit --tokenizer"
    for name in names if not settings.count_only else ():
        if name in HEADED and settings.medusa_heads is None:
            yield f"{name} needs --medusa-heads FOLDER"
        if name in PROMPTED and settings.prompt_tokens is None:
            yield f"{name} needs --prompt-tokens FOLDER"
    if settings.pass_times is not None and not {*names} - {None, *UNSPECULATED}:
        yield "--pass-times is for decoders with candidate trees: give --decoders"
    for path in settings.replay:
        if not path.is_file():
            yield f"--replay {path}: no such file"


@dataclass(frozen=True, slots=True)
class NamedDecoder:
    """Decoder, its kind (as in `load_decoder`), and the name under which answers are stored.

    `text` tokenizes for its model.
    """

    name: str
    kind: str
    decoder: AnswerDecoder
    text: ModelText


def choose_device(wanted: str) -> str:
    """Resolve a device; "auto" is CUDA if available."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise EvaluationError(f"--device {wanted}: this machine has no CUDA GPU")
    return wanted


def machine_name(wanted: str) -> str:
    """Return the name of a GPU, or the CPU and its number of cores; `wanted` is a device."""
    device = choose_device(wanted)
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def choose_dtype(wanted: str, device: str) -> torch.dtype:
    """Resolve a dtype; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    if wanted == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if wanted not in _DTYPES:
        raise EvaluationError(f"--dtype {wanted!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]


def load_decoders(settings: SpeedSettings, text: ModelText) -> list[NamedDecoder]:
    """Load the decoders, then the baseline, if any; those of the same checkpoint share one model.

    Raises EvaluationError if a model cannot be loaded.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    pass_times = None if settings.pass_times is None else read_passes(settings.pass_times)

    def build(name: str, kind: str, model: PreTrainedModel, text: ModelText) -> NamedDecoder:
        decoder = load_decoder(
            kind,
            model,
            text.tokenizer,
            medusa_heads=settings.medusa_heads,
            prompt_tokens=settings.prompt_tokens,
            pass_times=pass_times,
            device=device,
            dtype=dtype,
        )
        return NamedDecoder(name, kind, decoder, text)

    if settings.random_weights is None:
        model = load_checkpoint(settings.model, dtype, device)
    else:
        model = _random_model(settings.random_weights, text.vocabulary_size, dtype, device)
    decoders = [build(kind, kind, model, text) for kind in settings.decoders]
    if settings.baseline is None or settings.baseline_name is None:
        return decoders
    if settings.baseline_model is not None:
        model = load_checkpoint(settings.baseline_model, dtype, device)
        text = load_text(settings.baseline_model)
    return [*decoders, build(settings.baseline_name, settings.baseline, model, text)]


def load_checkpoint(name_or_path: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load a model for decoding. Raises EvaluationError if that fails."""
    try:
        model: Any = load_causal_model(name_or_path, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"no model in {name_or_path!r}: {reason}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def _random_model(
    preset_or_config: str, vocabulary_size: int, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Return an untrained model of a preset, or of a configuration file or its folder.

    Replay forces every token, so the speed is that of a trained model of the same size.
    """
    config = _random_config(preset_or_config)
    config.vocab_size = max(vocabulary_size, getattr(config, "vocab_size", 0))
    # Initialized on the device: 7 billion weights take minutes on a CPU.
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()  # type: ignore[no-any-return]


def _random_config(preset_or_config: str) -> PreTrainedConfig:
    if preset_or_config in _RANDOM_PRESETS:
        hidden, intermediate, layers, heads, positions = _RANDOM_PRESETS[preset_or_config]
        return LlamaConfig(
            vocab_size=1,
            # LlamaConfig would check these ids against the vocabulary of one entry.
            bos_token_id=None,
            eos_token_id=None,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=positions,
        )
    if not Path(preset_or_config).exists():
        raise EvaluationError(
            f"{preset_or_config!r} is neither {', '.join(_RANDOM_PRESETS)} nor a configuration file"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(preset_or_config)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{preset_or_config}: {str(error).splitlines()[0]}") from error
    return config


# ---- answers -----------------------------------------------------------------------------------

Store = LineStore[tuple[str, int, str], AnswerMeasurement]
"""Measured answers by question, turn and decoder."""


def run_speed(settings: SpeedSettings, folder: Path, progress: ShowProgress) -> Report:
    """Measure all answers that the folder does not contain yet; return the report.

    Raises EvaluationError for invalid settings, files or folder.
    """
    check_settings(settings)
    runs = (_replay if settings.replay else _generate)(settings, folder, progress)
    facts = {
        "Measured": settings.subject,
        "Answers": "replayed: " + ", ".join(dict.fromkeys(run.model for run in runs))
        if settings.replay
        else f"generated, greedy, to {settings.prompts}",
    }
    if not settings.count_only:
        names = ", ".join(settings.decoders)
        baseline = settings.baseline_name
        facts["Decoder"] = f"{names}, compared with {baseline}" if baseline else names
        if settings.repeats_text and not settings.replay:
            facts["Decoder"] += f" (forced to generate the text of {settings.decoders[0]})"
        facts["Machine"] = machine_name(settings.device)
    left_out = dict.fromkeys(reason for run in runs for reason in run.left_out)
    if left_out:
        facts["Left out"] = f"{len(left_out)} questions; {next(iter(left_out))}"
    cut = sum(not answer.ended for run in runs for answer in (*run.answers, *run.baseline))
    if cut:
        facts["Cut off"] = f"{cut} answers, by the token limit or the model's context"
    return speed_report("Generation speed and what forking saves", facts, runs)


def _generate(settings: SpeedSettings, folder: Path, progress: ShowProgress) -> list[SpeedRun]:
    """Let all decoders answer all turns greedily.

    The prompt of a later turn contains the decoder's own earlier answers. A plain baseline of the
    same model is forced to generate the first decoder's text: on its own, a model that has learned
    to fork ends its answers early if it may not fork.
    """
    questions = load_prompts(settings.prompts, settings.questions)[: settings.limit]
    decoders = load_decoders(settings, load_text(settings.model))
    store = _open(settings, folder, "answers.jsonl")
    limits = DecodeLimits(max_tokens=settings.max_tokens)
    _warm_up(decoders)

    def answer(_number: int, question: Question) -> list[AnswerKey]:
        number = len(settings.decoders)
        answers = [_answer_turns(each, question, store, limits) for each in decoders[:number]]
        for baseline in decoders[number:]:
            if settings.repeats_text:
                _repeat_turns(baseline, question, store, answers[0])
            else:
                _answer_turns(baseline, question, store, limits)
        return [_key(question, turn) for turn in range(len(question.turns))]

    show = progress.start(f"answers to {settings.prompts}", len(questions))
    keys, left_out = _answer_all(questions, answer, show)
    prompts = settings.prompts if "/" not in settings.prompts else Path(settings.prompts).stem
    return _runs(settings, settings.model_name, prompts, store, keys, left_out)


def _replay(settings: SpeedSettings, folder: Path, progress: ShowProgress) -> list[SpeedRun]:
    """Force the answers' trees through the decoders, or count their steps without a model."""
    sets = [read_answer_set(path, settings.questions) for path in settings.replay]
    if len({answers.label for answers in sets}) < len(sets):
        raise EvaluationError("two files to replay have the same name")
    name = settings.model if settings.runs_checkpoint else settings.tokenizer or LLAMA_TOKENIZER
    text = load_text(name)
    decoders = [] if settings.count_only else load_decoders(settings, text)
    runs = []
    for answers in sets:
        store = _open(settings, folder, f"answers-{file_name(answers.label)}.jsonl")
        chosen = answers.answers[: settings.limit]
        show = progress.start(answers.label, len(chosen))
        _warm_up(decoders)
        if settings.count_only:
            keys, left_out = _answer_all(chosen, partial(_count, text, store), show)
        else:
            keys, left_out = _answer_all(chosen, partial(_force, decoders, store), show)
        prompts = answers.benchmark or answers.label
        runs += _runs(settings, answers.label, prompts, store, keys, left_out)
    return runs


def _count(text: ModelText, store: Store, _number: int, answer: RecordedAnswer) -> list[AnswerKey]:
    """Count the steps and tokens of an answer's tree."""
    key = AnswerKey(answer.question_id, answer.turn, answer.category)
    if (key.question_id, key.turn, COUNT) not in store.lines:
        tree = token_tree(extract_tree(answer.text).tree, text.encode)
        store.add(counted(key, tree, len(text.encode_chat(answer.messages)), answer.text))
    return [key]


def _force(
    decoders: Sequence[NamedDecoder], store: Store, number: int, answer: RecordedAnswer
) -> list[AnswerKey]:
    """Force an answer's tree through the decoders, and its flat text through plain ones."""
    key = AnswerKey(answer.question_id, answer.turn, answer.category)
    tree = extract_tree(answer.text).tree
    # In an order that favours none.
    for each in decoders if number % 2 == 0 else decoders[::-1]:
        if (key.question_id, key.turn, each.name) in store.lines:
            continue
        scripts = _scripts(tree, each)
        limits = DecodeLimits(
            max_tokens=max(1, sum(map(len, scripts.values()))),
            max_threads=max(1, len(scripts)),
            max_forks=max(1, len(scripts)),
        )
        prompt_ids = each.text.encode_chat(answer.messages)
        decoded = decode_answer(each.decoder, prompt_ids, TokenChoice.replay(scripts), limits)
        store.add(measured(key, each.name, decoded, answer.text))
    return [key]


def _open(settings: SpeedSettings, folder: Path, name: str) -> Store:
    return LineStore(folder / name, settings.as_facts(), AnswerMeasurement, lambda line: line.key)


def _answer_all(
    items: Sequence[Item],
    answer: Callable[[int, Item], list[AnswerKey]],
    show: Callable[[], None],
) -> tuple[list[AnswerKey], list[str]]:
    """Return the answers that every decoder has given, and why others are missing."""
    keys: list[AnswerKey] = []
    left_out = []
    for number, item in enumerate(items):
        try:
            keys += answer(number, item)
        except RequestError as error:
            turn = f", turn {item.turn}" if isinstance(item, RecordedAnswer) else ""
            left_out.append(f"question {item.question_id}{turn}: {error}")
        show()
    return keys, left_out


def _runs(
    settings: SpeedSettings,
    model: str,
    prompts: str,
    store: Store,
    keys: Sequence[AnswerKey],
    left_out: Sequence[str],
) -> list[SpeedRun]:
    """Return a run for each decoder."""
    if not keys:
        raise EvaluationError(f"{model} answers none of {prompts}: {left_out[0]}")

    def of(decoder: str) -> tuple[AnswerMeasurement, ...]:
        return tuple(store.lines[key.question_id, key.turn, decoder] for key in keys)

    if settings.count_only:
        return [SpeedRun(model, prompts, of(COUNT))]
    baseline = () if settings.baseline_name is None else of(settings.baseline_name)
    several = len(settings.decoders) > 1
    return [
        SpeedRun(model, prompts, of(name), baseline, name if several else None, left_out)
        for name in settings.decoders
    ]


def _warm_up(decoders: Sequence[NamedDecoder]) -> None:
    """Let each decoder fork once, so that lazy initialization does not slow the first answer."""
    for each in decoders:
        prompt_ids = each.text.encode_prompt("Hello")
        decode_answer(each.decoder, prompt_ids, TokenChoice.replay(_scripts(_WARM_UP, each)))


class _Answer(NamedTuple):
    text: str
    token_ids: list[int]
    ended: bool


def _answer_turns(
    decoder: NamedDecoder, question: Question, store: Store, limits: DecodeLimits
) -> list[_Answer]:
    """Return the answer of each turn; stored answers of an earlier run are encoded again."""
    answers: list[_Answer] = []
    text = decoder.text
    for turn in range(len(question.turns)):
        known = store.lines.get((question.question_id, turn + 1, decoder.name))
        if known is None:
            prompt_ids = text.encode_question(question, turn, [answer.text for answer in answers])
            decoded = decode_answer(decoder.decoder, prompt_ids, TokenChoice.greedy(), limits)
            token_ids = decoded.text_ids
            known = measured(_key(question, turn), decoder.name, decoded, text.decode(token_ids))
            store.add(known)
        else:
            token_ids = text.encode(known.text)
        answers.append(_Answer(known.text, token_ids, known.ended))
    return answers


def _repeat_turns(
    plain: NamedDecoder, question: Question, store: Store, answers: Sequence[_Answer]
) -> None:
    """Force another decoder's answers through plain decoding of the same model."""
    text = plain.text
    for turn, answer in enumerate(answers):
        if (question.question_id, turn + 1, plain.name) in store.lines:
            continue
        prompt_ids = text.encode_question(question, turn, [each.text for each in answers[:turn]])
        script = [*answer.token_ids, *([text.end_id] if answer.ended else [])]
        limits = DecodeLimits(max_tokens=len(script))
        decoded = decode_answer(plain.decoder, prompt_ids, TokenChoice.replay({"": script}), limits)
        store.add(measured(_key(question, turn), plain.name, decoded, answer.text))


def _key(question: Question, turn: int) -> AnswerKey:
    return AnswerKey(question.question_id, turn + 1, question.category)


def _scripts(answer: ParagraphRecord, decoder: NamedDecoder) -> dict[str, list[int]]:
    tree = token_tree(answer, decoder.text.encode)
    # A decoder of one thread takes no fork tokens: it gets the same text in reading order.
    if decoder.kind in SINGLE_THREAD:
        return {"": [*restore(tree), decoder.text.end_id]}
    tokens = decoder.text.tokens
    return thread_scripts(tree, tokens.fork_id, tokens.end_id)
