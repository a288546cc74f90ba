"""Training text with the chat templates of four model families."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from apar_core.errors import TrainingError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage, ExampleRecord
from apar_core.offline.data.structure import extract_tree
from apar_core.offline.training.chat_format import chat_format, turn_end_id
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, next_indices
from apar_core.offline.training.pretrained import tree_tokens

TEMPLATES = Path(__file__).with_name("chat_templates")
POINTS = "1. Tune: the guitar first.\n2. Play: as slowly as needed.\n3. Rest: for a short while."
THOUGHT = (
    "<think>\n1. Tune: what is it?\n2. Play: who?\n3. Rest: no, `if x < 3: pass`.\n</think>\n\n"
)


@dataclass(frozen=True)
class Family:
    """Template with its special tokens and the text around an answer in serving."""

    template: str
    special: tuple[str, ...]
    prompt_end: str
    turn_end: str


LLAMA = Family(
    "llama3",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|eot_id|>",
)
QWEN = Family("qwen3", ("<|im_start|>", "<|im_end|>"), "<|im_start|>assistant\n", "<|im_end|>")
GEMMA = Family(
    "gemma3", ("<start_of_turn>", "<end_of_turn>"), "<start_of_turn>model\n", "<end_of_turn>"
)
DEEPSEEK = Family(
    "deepseek_r1_distill",
    ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    "<｜Assistant｜><think>\n",  # noqa: RUF001
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
)
FAMILIES = pytest.mark.parametrize(
    "family", [LLAMA, QWEN, GEMMA, DEEPSEEK], ids=lambda family: family.template
)


def tokenizer_of(family: Family, *, special_markers: bool = False) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    tokenizer.add_tokens(list(family.special), special_tokens=True)
    # In Qwen 3 and the distillations these tokens are not special.
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special_markers)
    tokenizer.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text()
    return tokenizer


def packed(tokenizer: PreTrainedTokenizerBase, answer: str) -> PackedTree:
    tree = extract_tree(answer).tree
    example = ExampleRecord("", (ChatMessage("user", "Tips?"),), tree)
    return ExampleEncoder(tokenizer, 1000).pack(example)


def root_thread(tokenizer: PreTrainedTokenizerBase, row: PackedTree) -> tuple[str, str]:
    """Return the root thread's text before its first target, and the text it learns."""
    following = next_indices(row)
    path = [0]
    while (after := following[path[-1]]) is not None:
        path.append(after)
    first = next(at for at, index in enumerate(path) if row.targets[index] != IGNORED_TARGET)
    read = [row.token_ids[index] for index in path[: first + 1]]
    learned = [row.targets[index] for index in path[first:] if row.targets[index] != IGNORED_TARGET]
    return str(tokenizer.decode(read)), str(tokenizer.decode(learned))


@FAMILIES
def test_a_turn_ends_with_the_token_of_the_template(family: Family) -> None:
    tokenizer = tokenizer_of(family)

    read, learned = root_thread(tokenizer, packed(tokenizer, "Tune it."))

    assert tokenizer.decode([turn_end_id(tokenizer)]) == family.turn_end
    assert tree_tokens(tokenizer).end_id == turn_end_id(tokenizer) != tokenizer.eos_token_id
    assert family.prompt_end in read
    assert learned == "Tune it." + family.turn_end


@FAMILIES
@pytest.mark.parametrize("special_markers", [False, True])
def test_a_thought_is_the_unforked_start_of_the_root_thread(
    family: Family, special_markers: bool
) -> None:
    tokenizer = tokenizer_of(family, special_markers=special_markers)
    row = packed(tokenizer, THOUGHT + POINTS)

    read, learned = root_thread(tokenizer, row)

    # Prompt and answer together are the text in serving, without duplicate markers.
    thought = THOUGHT.removeprefix("<think>\n") if family is DEEPSEEK else THOUGHT
    assert read.endswith(family.prompt_end)
    assert learned == (f"{thought}1. Tune:[Fork]\n2. Play:[Fork]\n3. Rest:[Fork]{family.turn_end}")
    vocabulary = tokenizer.get_vocab()
    for marker in ("<think>", "</think>"):
        assert list(row.token_ids).count(vocabulary[marker]) == 1
    assert list(row.token_ids).count(turn_end_id(tokenizer)) >= 4


def test_an_answer_without_a_thought_is_never_learned_inside_one() -> None:
    tokenizer = tokenizer_of(DEEPSEEK)

    read, learned = root_thread(tokenizer, packed(tokenizer, POINTS))

    assert read.endswith("<｜Assistant｜><think>\n\n</think>\n\n")  # noqa: RUF001
    assert learned.startswith("1. Tune:[Fork]")


@pytest.mark.parametrize("answer", [POINTS, "<think>\n\n</think>\n\n" + POINTS])
@pytest.mark.parametrize("shows_thoughts", [True, False])
def test_a_hybrid_model_does_not_learn_to_skip_its_thought(
    answer: str, shows_thoughts: bool
) -> None:
    tokenizer = tokenizer_of(QWEN)
    if not shows_thoughts:
        # Like SmolLM 3: answers in a chat have no thought; only the prompt differs.
        assert isinstance(tokenizer.chat_template, str)
        changed = tokenizer.chat_template.replace("> last.question", "> 1000")
        assert changed != tokenizer.chat_template
        tokenizer.chat_template = changed
    chat = [{"role": "user", "content": "Tips?"}]

    read, learned = root_thread(tokenizer, packed(tokenizer, answer))

    # The server's prompt if the client turns thinking off.
    assert read == tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert learned.startswith("1. Tune:[Fork]")


@pytest.mark.parametrize("family", [LLAMA, QWEN, DEEPSEEK], ids=lambda family: family.template)
def test_a_missing_opening_marker_of_a_thought_is_restored(
    family: Family,
) -> None:
    tokenizer = tokenizer_of(family)
    answer = "Let me see.\n</think>\n\n" + POINTS

    read, learned = root_thread(tokenizer, packed(tokenizer, answer))

    assert (read + learned).count("<think>\nLet me see.\n</think>\n\n1. Tune:[Fork]") == 1


def test_a_prompt_that_closes_the_thought_is_followed_only_by_the_answer() -> None:
    tokenizer = tokenizer_of(QWEN)
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = "{% set enable_thinking = false %}" + tokenizer.chat_template

    read, learned = root_thread(tokenizer, packed(tokenizer, THOUGHT + POINTS))

    assert read.endswith("<think>\n\n</think>\n\n")
    assert learned.startswith("1. Tune:[Fork]")


def test_a_template_without_an_end_token_is_refused() -> None:
    tokenizer = tokenizer_of(LLAMA)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\nEND{% endfor %}"

    with pytest.raises(TrainingError, match=r"writes '\\nEND' after an assistant's turn"):
        tree_tokens(tokenizer)


@pytest.mark.parametrize(
    ("answers", "opening", "lead"),
    [
        ("<a>{{ m['content'] }}", "<a>", ""),
        ("ASSISTANT: {{ m['content'] }}", "ASSISTANT:", " "),
        ("[/INST] {{ m['content'] }}", "[/INST]", " "),
        ("<a>\n{{ m['content'] }}", "<a>\n", ""),
        ("<a>\n<think>\n\n</think>\n\n{{ m['content'] }}", "<a>\n", ""),
        ("{{ m['content'] }}", "another", ""),
    ],
)
def test_the_whitespace_before_an_answer_comes_from_the_template(
    answers: str, opening: str, lead: str
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    assert chat_format(tokenizer).lead == ""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}"
        + answers.replace("\n", "{{ '\\n' }}")
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + opening.replace("\n", "{{ '\\n' }}")
        + "{% endif %}"
    )

    assert chat_format(tokenizer).lead == lead
