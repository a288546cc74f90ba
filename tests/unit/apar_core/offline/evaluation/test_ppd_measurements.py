"""Measurements of Parallel Prompt Decoding: trees, pass times, answers and their report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.offline.decoders.interface import DecodedAnswer, DecodedThread, StepRecord
from apar_core.offline.decoders.load import DECODER_NAMES, DecoderName
from apar_core.offline.evaluation.ppd import compare_threads
from apar_core.offline.evaluation.ppd_measurements import (
    LivePasses,
    MethodAnswer,
    PpdSettings,
    check_decoders,
    compared_trees,
    length_interval,
    method_answer,
    variant_recipe,
    variants,
)
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.prompt_tokens import PromptTokens, save_prompt_tokens
from apar_core.offline.speculation.train_prompts import PROMPT_TOKENS
from apar_core.tree.thread_names import ROOT_THREAD, child_thread
from tests.fakes import apar_command

TABLE = AcceptanceTable(
    probabilities=((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.1)),
    observations=(100, 100, 100),
    source="made up",
)


def answer_of(question_id: str, live: dict[int, tuple[int, int]]) -> MethodAnswer:
    return MethodAnswer(
        question_id=question_id, method="ppd", text_tokens=4, text="", threads=(), prefill_s=0.0,
        live={rows: LivePasses(passes=n, tokens=t, seconds=1.0) for rows, (n, t) in live.items()},
    )  # fmt: skip


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_compared_trees_fit_their_size_and_rank_as_in_the_paper(size: int) -> None:
    trees = compared_trees(TABLE, size, 1, seed=0)
    lengths = {kind: tree.expected_length() for kind, tree in trees.items()}

    assert all(tree.num_inputs() <= size for kind, tree in trees.items() if kind != "random")
    assert lengths["optimal"] >= lengths["dynamic"] - 1e-9
    assert lengths["dynamic"] >= lengths["static"] - 1e-9
    assert lengths["dynamic"] >= lengths["random"] - 1e-9


def test_an_answer_is_measured_by_live_threads_without_its_prefill() -> None:
    records = (
        StepRecord(1, 1, 1, 9.0, 3, 3),
        StepRecord(2, 1, 2, 0.1, 4, 4),
        StepRecord(3, 2, 3, 0.2, 4, 4),
        StepRecord(4, 2, 1, 0.4, 4, 4),
    )
    threads = (DecodedThread(ROOT_THREAD, None, 0, (5, 6, 7), True),)

    answer = method_answer("q", "ppd", DecodedAnswer(threads, records, 3, None), "text")

    assert answer.prefill_s == 9.0
    assert answer.live[1] == LivePasses(passes=1, tokens=2, seconds=0.1)
    assert answer.live[2].tokens == 4
    assert answer.thread_passes == 1 + 2 * 2
    assert answer.total.seconds == pytest.approx(0.7)


def test_the_interval_of_equal_answers_is_a_point() -> None:
    answers = [answer_of(str(number), {1: (2, 4), 2: (1, 4)}) for number in range(5)]

    assert length_interval(answers) == (2.0, 2.0, 2.0)


def test_variants_change_what_their_names_say() -> None:
    kinds = variants(10)
    base = PROMPT_TOKENS.tiny_recipe().recipe
    recipes = {name: variant_recipe(variant, base, 60, 3) for name, variant in kinds.items()}

    assert recipes["1 EPT"].ensemble == 1
    assert recipes["1 EPT"].num_steps == 60
    assert recipes["1 EPT, 1/6 of the steps"].num_steps == 10
    assert recipes["1 EPT, batch of 1"].batch_size == 1
    assert recipes["1 EPT, batch of 1"].num_steps == 4 * 60
    assert recipes["10 EPTs, labels, decoder mask"].mask == "decoder"
    assert {recipe.seed for recipe in recipes.values()} == {3}
    assert len({recipe.model_dump_json() for recipe in recipes.values()}) == len(kinds)
    assert {"2 EPTs, labels", "5 EPTs, labels"} <= kinds.keys()
    assert "5 EPTs, labels" not in variants(4)


def test_variants_have_the_paper_s_values_of_training_as_theirs() -> None:
    """Tables 2, 6 and 7 repeat the values that table 3 has without distillation."""
    kinds = variants(10)
    base = PROMPT_TOKENS.tiny_recipe().recipe

    for name, variant in kinds.items():
        assert (variant_recipe(variant, base, 60).loss == "labels") == ("labels" in name)
        in_tables = {2, 6, 7}.intersection(map(int, re.findall(r"\d", variant.place)))
        assert ("labels" in name) == bool(in_tables) or variant.paper is None
    assert kinds["1 EPT, labels"].paper == (0.472, 0.771, 0.248, 0.576)
    assert kinds["10 EPTs, labels"].paper == (0.506, 0.794, 0.276, 0.602)
    assert kinds["1 EPT"].paper == (0.485, 0.779, 0.261, 0.586)


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Path]:
    """Untrained prompt tokens and the Medusa heads, with made-up acceptance tables."""
    prompts, heads = tmp_path / "prompts", tmp_path / "heads"
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    save_prompt_tokens(PromptTokens.like_text(model), prompts)
    TABLE.write(prompts)
    shutil.copytree(SHIPPED_HEADS["apar-tiny"], heads)
    two = AcceptanceTable(
        probabilities=TABLE.probabilities[:2], observations=(100, 100), source="made up"
    )
    two.write(heads)
    return prompts, heads


@pytest.mark.slow
def test_the_command_writes_its_report_and_continues(
    tmp_path: Path, weights: tuple[Path, Path]
) -> None:
    out = tmp_path / "out"
    command = (
        *("evaluate", "ppd", "--prompt-tokens", weights[0], "--medusa-heads", weights[1]),
        *("--max-tokens", "60", "--context", "16", "--tree-sizes", "4", "--out", out),
        *("--draft-model", checkpoint_path(), "--draft-prompts", weights[0]),
    )

    code, output = apar_command.run(*command, "--answers", "1", "--decoders", "lookup_apar")
    assert code == 0, output
    written = (out / "answers.jsonl").read_text()
    measured = {json.loads(line)["method"] for line in written.splitlines()}
    assert measured == {"plain", "vanilla_apar", "lookup_apar", "draft, plain", "draft, ppd"}
    # The others are added.
    code, output = apar_command.run(*command, "--answers", "2")

    assert code == 0, output
    assert (out / "answers.jsonl").read_text().startswith(written)
    assert ": none differ" in output
    assert "recycling_apar" in output
    assert (out / "report.html").is_file()
    methods = (out / "tables" / "methods.csv").read_text()
    assert '"draft, plain"' in methods
    assert '"draft, ppd"' in methods
    tables = {path.stem for path in (out / "tables").glob("*.csv")}
    assert {"methods", "trees", "live-rows", "sizes", "chain-in-vllm", "memory"} <= tables


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model", "x/y", "x/y needs --prompt-tokens"),
        ("--seeds", "3", "--seeds is for the variants that --train-steps trains"),
    ],
)
def test_unusable_options_are_refused(
    tmp_path: Path, option: str, value: str, message: str
) -> None:
    code, output = apar_command.run("evaluate", "ppd", option, value, "--out", tmp_path / "o")

    assert code == 1
    assert message in output


@pytest.mark.parametrize(
    ("chosen", "vocabulary", "message"),
    [
        ("medusa_apar", {"[Fork]": 1, "[Child]": 2}, "medusa_apar needs --medusa-heads"),
        ("ppd_apar", {"a": 1}, "ppd_apar needs a model with control tokens"),
    ],
)
def test_a_decoder_that_cannot_be_compared_is_named(
    chosen: DecoderName, vocabulary: dict[str, int], message: str
) -> None:
    settings = PpdSettings(
        model="m", model_name="m", prompt_tokens=Path("p"), decoders=("plain", chosen)
    )

    with pytest.raises(EvaluationError, match=message):
        check_decoders(settings, vocabulary)
    check_decoders(settings.model_copy(update={"decoders": DECODER_NAMES}), vocabulary)


def test_threads_are_compared_with_those_without_speculation() -> None:
    def of(method: str, root: Sequence[int], *children: Sequence[int]) -> MethodAnswer:
        """Return an answer whose threads ended if their last token is 0."""
        threads = [DecodedThread(ROOT_THREAD, None, 0, tuple(root), root[-1] == 0)]
        for ordinal, tokens in enumerate(children):
            name = child_thread(ROOT_THREAD, ordinal)
            ended = tokens[-1] == 0
            threads.append(DecodedThread(name, ROOT_THREAD, ordinal, tuple(tokens), ended))
        number = sum(len(tokens) - (tokens[-1] == 0) for tokens in (root, *children))
        changes = {"method": method, "threads": tuple(threads), "text_tokens": number}
        return answer_of("1", {1: (1, 1)}).model_copy(update=changes)

    plain, forked = [5, 6, 7], ([5, 0], [6, 7, 0])
    base = {"plain": [of("plain", plain)], "vanilla_apar": [of("vanilla_apar", *forked)]}

    def different(method: str, *threads: Sequence[int]) -> int:
        equal = compare_threads({**base, method: [of(method, *threads)]})
        assert equal.known == 3
        return equal.different

    assert compare_threads({**base, "ppd_apar": [of("ppd_apar", *forked)]}).compared == 2
    assert different("ppd", plain) == 0
    assert different("ppd", [5, 6, 8]) == 1
    assert different("ppd", [5, 6]) == 1
    # No limit cut the answer: a thread is missing, ends early, or goes on where it must end.
    assert different("ppd_apar", [5, 0]) == 1
    assert different("ppd_apar", [5, 0], [6, 0]) == 1
    assert different("ppd_apar", [5, 0], [6, 7, 0, 0]) == 1
    # One did: threads are compared as far as they go, but all text tokens must be there.
    base["vanilla_apar"] = [of("vanilla_apar", [5, 8], [6, 7])]
    assert different("ppd_apar", [5, 8, 9], [6]) == 0
    assert different("ppd_apar", [5, 8, 9, 9]) == 0
    assert different("ppd_apar", [5, 8, 9], [7]) == 1
    assert different("ppd_apar", [5, 8], [6]) == 1
