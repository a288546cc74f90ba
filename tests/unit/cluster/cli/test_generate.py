"""`apar generate`: decoders on the embedded model, and how threads are shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.offline.decoders.load import DECODER_NAMES
from apar_core.tree import ROOT_THREAD, ParagraphTree, ThreadId, TreeStatistics
from cluster.cli.generate import statistics_line, thread_view
from tests.fakes.apar_command import apar
from tests.integration.random_checkpoint import write_checkpoint

LIST_PROMPT = "Give me 5 tips for learning guitar."
DECODERS = DECODER_NAMES


def generate(*arguments: str) -> tuple[int, str, str]:
    result = apar("generate", *arguments)
    return result.exit_code, result.stdout, result.stderr


def num_passes(output: str) -> int:
    found = re.search(r": (\d+) passes", output)
    assert found is not None
    return int(found.group(1))


@pytest.mark.ci
def test_forking_decoders_print_the_same_list() -> None:
    vanilla, medusa, prompted = (
        generate(LIST_PROMPT, "--decoder", name)
        for name in ("vanilla_apar", "medusa_apar", "ppd_apar")
    )

    assert vanilla[0] == 0, vanilla[2]
    assert vanilla[:2] == medusa[:2] == prompted[:2]
    for number in range(1, 6):
        assert f"{number}. " in vanilla[1]
    assert "[Fork]" not in vanilla[1]


@pytest.mark.ci
def test_threads_are_shown_with_their_forward_passes() -> None:
    shown = {name: generate(LIST_PROMPT, "--decoder", name, "--show-threads") for name in DECODERS}

    for name, (exit_code, output, error) in shown.items():
        assert exit_code == 0, error
        assert output.startswith("root  ")
        assert output.splitlines()[-1].startswith(f"{name}: ")
    assert "├── root." not in shown["plain"][1]
    assert "├── root." in shown["vanilla_apar"][1]
    passes = {name: num_passes(output) for name, (_, output, _) in shown.items()}
    assert passes["medusa_apar"] < passes["vanilla_apar"]
    # On a CPU, prompt tokens that guess badly get trees without candidates.
    assert passes["ppd_apar"] <= passes["vanilla_apar"]
    assert passes["ppd"] <= passes["plain"]


def test_without_forks_every_decoder_prints_what_plain_does() -> None:
    expected = generate(LIST_PROMPT, "--decoder", "plain", "--max-tokens", "30")

    assert expected[0] == 0, expected[2]
    for name in DECODERS:
        arguments = (LIST_PROMPT, "--decoder", name, "--no-fork", "--max-tokens", "30")
        assert generate(*arguments)[:2] == expected[:2]


def test_a_seed_makes_an_answer_at_a_temperature_repeatable() -> None:
    arguments = (LIST_PROMPT, "--decoder", "vanilla_apar", "--temperature", "1.5", "--seed")

    texts = [generate(*arguments, seed)[1] for seed in ("1", "1", "2")]

    assert texts[0]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_raw_prompt_may_spell_a_control_token() -> None:
    exit_code, output, error = generate(
        "[Fork] tips", "--raw", "--decoder", "vanilla_apar", "--max-tokens", "5"
    )

    assert exit_code == 0, error
    assert output


def test_a_model_folder_takes_heads_by_their_folder() -> None:
    arguments = (LIST_PROMPT, "--model", str(checkpoint_path()), "--decoder", "medusa_apar")

    exit_code, output, error = generate(
        *arguments, "--medusa-heads", str(SHIPPED_HEADS["apar-tiny"])
    )

    assert exit_code == 0, error
    assert output == generate(LIST_PROMPT, "--decoder", "medusa_apar")[1]


def test_plain_takes_a_model_without_control_tokens_or_chat_template(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    exit_code, output, error = generate(
        "Hi", "--model", str(model), "--decoder", "plain", "--max-tokens", "5"
    )

    assert exit_code == 0, error
    assert output


def test_medusa_without_heads_on_another_model_is_an_error() -> None:
    exit_code, output, error = generate(
        LIST_PROMPT, "--model", str(checkpoint_path()), "--decoder", "medusa_apar"
    )

    assert (exit_code, output) == (1, "")
    assert f"Error: {checkpoint_path()}: medusa_apar needs medusa_heads" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("--decoder", "vllm"),
        ("--decoder", "plain"),
        ("--decoder", "vanilla_apar"),
        ("--decoder", "lookup_apar"),
    ],
)
def test_heads_for_another_decoder_are_an_error(arguments: tuple[str, ...]) -> None:
    exit_code, output, error = generate("Hi", *arguments, "--medusa-heads", "my-heads")

    assert (exit_code, output) == (1, "")
    assert "--medusa-heads my-heads: only --decoder medusa and medusa_apar use heads" in error


@pytest.mark.parametrize("name", ["vllm", "plain", "medusa_apar"])
def test_prompt_tokens_for_another_decoder_are_an_error(name: str) -> None:
    exit_code, output, error = generate("Hi", "--decoder", name, "--prompt-tokens", "mine")

    assert (exit_code, output) == (1, "")
    assert "--prompt-tokens mine: only --decoder ppd and ppd_apar use prompt tokens" in error


@pytest.mark.parametrize("name", ["ppd", "ppd_apar"])
def test_ppd_without_prompt_tokens_on_another_model_is_an_error(name: str) -> None:
    exit_code, output, error = generate("Hi", "--model", str(checkpoint_path()), "--decoder", name)

    assert (exit_code, output) == (1, "")
    assert f"Error: {checkpoint_path()}: {name} needs prompt_tokens" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--decoder", "fast"),
            "decoder must be one of plain, vanilla_apar, medusa, medusa_apar, ppd",
        ),
        (("--decoder", "ppd", "--prompt-tokens", "{folder}"), "no configuration of prompt tokens"),
        (("--decoder", "plain", "--model", "{folder}"), "cannot load model"),
        (("--decoder", "medusa_apar", "--medusa-heads", "{folder}"), "no configuration of Medusa"),
    ],
)
def test_errors_have_no_traceback(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    exit_code, output, error = generate(
        "Hi", *(argument.format(folder=tmp_path) for argument in arguments)
    )

    assert (exit_code, output) == (1, "")
    assert message in error
    assert "Traceback" not in error


def test_a_prompt_longer_than_the_context_is_an_error() -> None:
    exit_code, _, error = generate("word " * 3000, "--decoder", "vanilla_apar")

    assert exit_code == 1
    assert "leaves no room in a context of" in error


def render(tree: ParagraphTree[str]) -> str:
    def decode(items: Sequence[str]) -> str:
        return " ".join(items)

    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(thread_view(tree, decode))
    return capture.get()


def test_threads_are_shown_where_they_forked_with_tokens_and_steps() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    first, second, nested = ThreadId("first"), ThreadId("second"), ThreadId("nested")
    tree.append(ROOT_THREAD, ["1.", "Tune:"])
    tree.fork(ROOT_THREAD, first)
    tree.append(ROOT_THREAD, ["2.", "Play:"])
    tree.fork(ROOT_THREAD, second)
    tree.append(first, ["By", "ear."])
    tree.fork(first, nested)
    tree.append(nested, ["Or", "[a", "fork]."])
    tree.append(second, ["Daily."])
    tree.finish(ROOT_THREAD)
    tree.finish(first)
    tree.finish(nested, ended=False)

    # first starts after the root's third token, nested after first's third, in step 6.
    assert render(tree).split("\n") == [
        "root  4 tokens, steps 1-7",
        "├── 1. Tune:",
        "├── first  2 tokens, steps 4-7",
        "│   ├── By ear.",
        "│   └── nested  3 tokens, steps 7-9, cut off",
        "│       └── Or [a fork].",
        "├── 2. Play:",
        "└── second  1 tokens, steps 7-7, cut off",
        "    └── Daily.",
        "",
    ]


def test_a_thread_that_waits_has_steps_before_and_behind_its_children() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    first, second = ThreadId("first"), ThreadId("second")
    tree.append(ROOT_THREAD, ["Two:"])
    tree.open_block(ROOT_THREAD, [first, second], [1, 1], [["1"], ["2"]])
    tree.append(first, ["Tune", ">"])
    tree.append(second, ["Play", "it", "all"])
    tree.close_child(first, [], is_closed=True)
    tree.finish(first, ended=False)
    tree.close_child(second, [">"], is_closed=False)
    tree.finish(second, ended=False)
    tree.join(ROOT_THREAD, ["Now"])
    tree.append(ROOT_THREAD, ["go."])
    tree.finish(ROOT_THREAD)

    assert render(tree).split("\n") == [
        "root  2 tokens, steps 1-1, 5-6",
        "├── Two:",
        "├── first  2 tokens, steps 2-3",
        "│   └── 1 Tune >",
        "├── second  3 tokens, steps 2-4, cut off",
        "│   └── 2 Play it all >",
        "└── Now go.",
        "",
    ]


def test_a_thread_that_never_ran_says_so() -> None:
    tree: ParagraphTree[str] = ParagraphTree()
    tree.fork(ROOT_THREAD, ThreadId("late"))

    assert "late  0 tokens, no step, cut off" in render(tree)


def test_savings_are_percentages_of_sequential_decoding() -> None:
    statistics = TreeStatistics(
        threads=3,
        forks=2,
        max_depth=1,
        decode_steps=20,
        sequential_steps=41,
        attended_tokens=75,
        sequential_attended_tokens=100,
        max_cached_tokens=55,
        sequential_max_cached_tokens=50,
        text_tokens=40,
        control_tokens=7,
    )

    assert statistics_line(statistics) == (
        "3 threads, 40 tokens in 20 steps instead of 41; "
        "attended tokens -25 %, max cached tokens +10 %"
    )


def test_an_infinite_temperature_is_refused() -> None:
    exit_code, _, error = generate(LIST_PROMPT, "--temperature", "inf")

    assert exit_code == 2
    assert "Invalid value for '--temperature': inf is not a finite number" in error
