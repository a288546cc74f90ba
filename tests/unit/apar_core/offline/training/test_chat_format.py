"""Training text and user headers with the chat templates of several model families."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from apar_core.errors import TrainingError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage, ExampleRecord
from apar_core.offline.data.structure import extract_tree
from apar_core.offline.training.chat_format import (
    ChatRefusedError,
    UserTurn,
    chat_format,
    turn_end_id,
    user_turn,
)
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.packing import IGNORED_TARGET, PackedTree, next_indices
from apar_core.offline.training.pretrained import VICUNA_TEMPLATE, tree_tokens

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


@pytest.mark.parametrize(
    ("family", "header", "with_system", "end"),
    [
        (
            LLAMA,
            "<bos><|start_header_id|>user<|end_header_id|>\n\n",
            "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|>",
        ),
        (
            QWEN,
            "<|im_start|>user\n",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>",
        ),
        (
            GEMMA,
            "<bos><start_of_turn>user\n",
            "<bos><start_of_turn>user\nBe brief.\n\n",
            "<end_of_turn>",
        ),
        (DEEPSEEK, "<bos><｜User｜>", "<bos>Be brief.<｜User｜>", "<｜Assistant｜>"),  # noqa: RUF001
    ],
    ids=lambda value: value.template if isinstance(value, Family) else "",
)
def test_a_question_is_sampled_behind_the_user_header_up_to_the_token_of_the_template(
    family: Family, header: str, with_system: str, end: str
) -> None:
    tokenizer = tokenizer_of(family)
    end_id = tokenizer.get_vocab()[end]

    assert user_turn(tokenizer) == UserTurn(header, end_id, "")
    assert user_turn(tokenizer, "Be brief.") == UserTurn(with_system, end_id, "")


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
ALPACA = (
    "{{ 'Below is a task.\n\n' }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '### Instruction:\n' + m['content'] + '\n\n' }}{% else %}"
    "{{ '### Response:\n' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "header", "end_text"),
    [
        (
            VICUNA_TEMPLATE.read_text(),
            "<bos> A chat between a curious user and an artificial intelligence assistant. The "
            "assistant gives helpful, detailed, and polite answers to the user's questions. USER: ",
            "ASSISTANT:",
        ),
        (MISTRAL, "<bos>[INST] ", "[/INST]"),
        (ALPACA, "Below is a task.\n\n### Instruction:\n", "\n### Response:"),
    ],
    ids=["vicuna", "mistral", "alpaca"],
)
def test_a_question_ends_at_the_text_behind_it_if_no_token_ends_it(
    template: str, header: str, end_text: str
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    tokenizer.chat_template = template

    assert user_turn(tokenizer) == UserTurn(header, None, end_text)


def test_a_text_that_is_a_token_in_the_vocabulary_ends_a_question_as_a_token() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    tokenizer.add_tokens(["[INST]", "[/INST]"], special_tokens=True)
    tokenizer.chat_template = MISTRAL

    turn = user_turn(tokenizer)

    assert turn == UserTurn("<bos>[INST] ", tokenizer.get_vocab()["[/INST]"], "")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0]['content'] }}A:", "writes no text of its own before a user's message"),
        ("{{ bos_token + messages[0]['content'] }}A:", "no text of its own before"),
        ("Q: {{ messages[0]['content'] }}", "writes nothing between a user's message"),
        ("Q: {{ messages | length }} A:", "does not write the user's message"),
    ],
)
def test_a_template_that_does_not_mark_a_question_is_refused(template: str, words: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    tokenizer.chat_template = template

    with pytest.raises(TrainingError, match=words):
        user_turn(tokenizer)


def test_a_system_message_that_a_template_refuses_or_ignores_is_an_error() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    tokenizer.chat_template = MISTRAL
    with pytest.raises(ChatRefusedError, match="Only user and assistant roles"):
        user_turn(tokenizer, "Be brief.")

    tokenizer.chat_template = MISTRAL.replace("raise_exception(", "('' and ")
    with pytest.raises(TrainingError, match="does not write the system message"):
        user_turn(tokenizer, "Be brief.")
