"""Speed evaluation: from settings to report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apar_core.errors import EvaluationError
from apar_core.offline.decoders.interface import DecodeLimits
from apar_core.offline.evaluation.answer_files import AnswerSet, read_answer_set
from apar_core.offline.evaluation.measurement import COUNT, AnswerStore
from apar_core.offline.evaluation.prompt_sets import load_prompts
from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, ModelText, load_text
from apar_core.offline.evaluation.speed_report import SpeedRun, speed_report
from apar_core.offline.evaluation.speed_run import (
    AnsweredKeys,
    Decoders,
    SpeedSettings,
    check_settings,
    count_answers,
    generate_answers,
    load_decoders,
    machine_name,
    replay_answers,
    warm_up,
)
from apar_core.reporting import Report, ShowProgress, claim_folder, file_name


def run_speed(settings: SpeedSettings, folder: Path, progress: ShowProgress) -> Report:
    """Measure all answers that the folder does not contain yet; return the report.

    Raises EvaluationError for invalid settings, files or folder.
    """
    check_settings(settings)
    if settings.replay:
        runs = _replay(settings, folder, progress)
    else:
        runs = _generate(settings, folder, progress)
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
    facts |= _missing(runs)
    return speed_report("Generation speed and what forking saves", facts, runs)


def _generate(settings: SpeedSettings, folder: Path, progress: ShowProgress) -> list[SpeedRun]:
    questions = load_prompts(settings.prompts, settings.questions)[: settings.limit]
    text = load_text(settings.model)
    decoders = load_decoders(settings, text)
    claim_folder(folder, settings.as_facts())
    store = AnswerStore(folder / "answers.jsonl")
    show = progress.start(f"answers to {settings.prompts}", len(questions))
    limits = DecodeLimits(max_tokens=settings.max_tokens)
    warm_up(decoders)
    done = generate_answers(decoders, questions, store, limits, show)
    prompts = settings.prompts if "/" not in settings.prompts else Path(settings.prompts).stem
    return _runs(settings, settings.model_name, prompts, store, done)


def _replay(settings: SpeedSettings, folder: Path, progress: ShowProgress) -> list[SpeedRun]:
    sets = [read_answer_set(path, settings.questions) for path in settings.replay]
    if len({answers.label for answers in sets}) < len(sets):
        raise EvaluationError("two files to replay have the same name")
    if settings.runs_checkpoint:
        text = load_text(settings.model)
    else:
        text = load_text(settings.tokenizer or LLAMA_TOKENIZER)
    decoders = None if settings.count_only else load_decoders(settings, text)
    claim_folder(folder, settings.as_facts())
    return [
        run
        for answers in sets
        for run in _replay_set(settings, answers, text, decoders, folder, progress)
    ]


def _replay_set(
    settings: SpeedSettings,
    answers: AnswerSet,
    text: ModelText,
    decoders: Decoders | None,
    folder: Path,
    progress: ShowProgress,
) -> list[SpeedRun]:
    store = AnswerStore(folder / f"answers-{file_name(answers.label)}.jsonl")
    chosen = answers.answers[: settings.limit]
    show = progress.start(answers.label, len(chosen))
    prompts = answers.benchmark or answers.label
    if decoders is None:
        done = count_answers(text, chosen, store, show)
        return [SpeedRun(answers.label, prompts, store.of_decoder(COUNT, done.keys))]
    warm_up(decoders)
    done = replay_answers(decoders, chosen, store, show)
    return _runs(settings, answers.label, prompts, store, done)


def _runs(
    settings: SpeedSettings,
    model: str,
    prompts: str,
    store: AnswerStore,
    done: AnsweredKeys,
) -> list[SpeedRun]:
    """Return a run for each decoder."""
    if not done.keys:
        raise EvaluationError(f"{model} answers none of {prompts}: {done.left_out[0]}")
    name = settings.baseline_name
    baseline = store.of_decoder(name, done.keys) if name is not None else ()
    several = len(settings.decoders) > 1
    return [
        SpeedRun(
            model,
            prompts,
            store.of_decoder(name, done.keys),
            baseline,
            name if several else None,
            done.left_out,
        )
        for name in settings.decoders
    ]


def _missing(runs: Sequence[SpeedRun]) -> dict[str, str]:
    """Return facts about missing and truncated answers."""
    facts = {}
    left_out = dict.fromkeys(reason for run in runs for reason in run.left_out)
    if left_out:
        facts["Left out"] = f"{len(left_out)} questions; {next(iter(left_out))}"
    cut = sum(not answer.ended for run in runs for answer in (*run.answers, *run.baseline))
    if cut:
        facts["Cut off"] = f"{cut} answers, by the token limit or the model's context"
    return facts
