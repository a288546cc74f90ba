"""Examples as rows of a bounded length."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text, vicuna_prompt
from apar_core.offline.training.example_encoder import (
    ExampleEncoder,
    cut_tree,
    prompt_token_ids,
)
from apar_core.offline.training.packing import IGNORED_TARGET
from apar_core.offline.training.pretrained import VICUNA_TEMPLATE
from tests.unit.apar_core.offline.training.random_trees import TOKENS, encode, packed

TOKENIZER = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
CONTROL_IDS = set(TOKENIZER.convert_tokens_to_ids(["[Fork]", "[Child]"]))


def example(question: str, answer: ParagraphRecord, *, raw: bool = False) -> ExampleRecord:
    return ExampleRecord("numbered", (ChatMessage("user", question),), answer, raw_prompt=raw)


def points(number: int) -> ParagraphRecord:
    return chain([(f"{i}. Point:", ParagraphRecord(f" detail {i}.\n")) for i in range(number)])


def test_an_example_is_packed_behind_the_prompt_that_the_server_sends() -> None:
    answer = chain([("One:", ParagraphRecord(" detail."))])

    row = ExampleEncoder(TOKENIZER, 100).pack(example("Hello", answer))

    text = TOKENIZER.decode(row.token_ids)
    assert text == "<bos><|user|>Hello<|assistant|>One:[Fork][Child] detail.<eos><eos>"
    raw = example("Hello", answer, raw=True)
    assert TOKENIZER.decode(prompt_token_ids(raw, TOKENIZER)) == "<bos>Hello"


def test_no_text_of_a_user_or_an_answer_becomes_a_control_token() -> None:
    answer = ParagraphRecord("Write [Fork] and [Child] or <eos>.")

    row = ExampleEncoder(TOKENIZER, 100).pack(example("What is [Fork]?", answer))

    assert CONTROL_IDS.isdisjoint(row.token_ids)
    assert list(row.token_ids).count(TOKENIZER.eos_token_id) == 1
    assert TOKENIZER.decode(row.token_ids[:-1]) == (
        "<bos><|user|>What is [Fork]?<|assistant|>Write [Fork] and [Child] or <eos>."
    )


def test_a_long_tree_is_cut_at_a_thread_and_learns_nothing_of_the_rest() -> None:
    # g | a [Fork] | [Child] b c end | d [Fork] | [Child] e end | end
    tree = packed("g", chain([("a", ParagraphRecord("bc")), ("d", ParagraphRecord("e"))]))
    a, b, c, d, g = (encode(letter)[0] for letter in "abcdg")
    no = IGNORED_TARGET

    cuts = {limit: cut_tree(tree, limit) for limit in (2, 3, 6, 7, 8, 9)}

    assert cuts[2] is None
    assert cuts[3] is not None
    assert list(cuts[3].token_ids) == [g, a, 1]
    assert list(cuts[3].targets) == [a, 1, no]
    assert cuts[6] == cuts[3]
    assert cuts[7] is not None
    assert list(cuts[7].token_ids) == [g, a, 1, 2, b, c, 3]
    assert list(cuts[7].targets) == [a, 1, no, b, c, 3, no]
    assert cuts[8] == cuts[7]
    assert cuts[9] is not None
    assert list(cuts[9].targets) == [a, 1, d, b, c, 3, no, 1, no]
    assert len(cuts[9].segment_parents) == 3
    assert TOKENS.end_id not in cuts[9].targets[6:]


def test_examples_are_counted_whole_cut_and_dropped() -> None:
    encoder = ExampleEncoder(TOKENIZER, 40)
    unforked = ParagraphRecord("word " * 60)

    rows = encoder.encode_all(
        [example("Hi", points(1)), example("Hi", points(9)), example("Hi", unforked)]
    )

    assert (encoder.counts.whole, encoder.counts.cut, encoder.counts.dropped) == (1, 1, 1)
    assert all(len(row.token_ids) <= 40 for row in rows)
    assert str(encoder.counts) == (
        "1 examples whole, 1 too long and cut at a thread, 1 too long and dropped"
    )


def test_a_prompt_that_leaves_no_room_drops_the_example() -> None:
    encoder = ExampleEncoder(TOKENIZER, 20)

    assert encoder.encode(example("why " * 40, points(2))) is None


def test_the_oldest_turns_are_dropped_until_the_example_fits() -> None:
    def chat(*turns: str) -> tuple[ChatMessage, ...]:
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        return tuple(ChatMessage(*turn) for turn in zip(roles, turns, strict=False))

    whole = ExampleRecord(
        "numbered", chat("Be kind.", "a " * 40, "b " * 40, "Hi", "Ho", "Why?"), points(1)
    )
    encoder = ExampleEncoder(TOKENIZER, 80)

    row = encoder.encode(whole)

    assert row is not None
    assert TOKENIZER.decode(row.token_ids).startswith(
        "<bos><|system|>Be kind.<|user|>Hi<|assistant|>Ho<eos><|user|>Why?<|assistant|>0. Point:"
    )
    assert (encoder.counts.whole, encoder.counts.shortened) == (1, 1)
    assert "1 examples whole (1 without their oldest turns)" in str(encoder.counts)
    short = ExampleRecord("numbered", whole.messages[-3:], points(1))
    assert encoder.fitted(short) is short
    kept = encoder.fitted(whole)
    assert kept is not None
    assert kept.messages == (whole.messages[0], *whole.messages[3:])
    # The last question stays, whether it fits or not.
    assert ExampleEncoder(TOKENIZER, 10).fitted(whole) is None


def vicuna_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = load_text(LLAMA_TOKENIZER).tokenizer
    tokenizer.chat_template = VICUNA_TEMPLATE.read_text()
    return tokenizer


def test_vicuna_learns_an_answer_in_the_tokens_that_it_was_trained_on() -> None:
    tokenizer = vicuna_tokenizer()
    chat = tuple(
        ChatMessage(role, text)
        for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"))
    )
    # As FastChat writes a chat: a blank before every answer, the last one included.
    whole = vicuna_prompt(chat) + " Because it is.</s>"

    row = ExampleEncoder(tokenizer, 200).pack(
        ExampleRecord("unstructured", chat, ParagraphRecord("Because it is."))
    )

    assert list(row.token_ids) == tokenizer(whole)["input_ids"]
    learned = [target for target in row.targets if target != IGNORED_TARGET]
    assert tokenizer.convert_ids_to_tokens(learned) == ["▁Because", "▁it", "▁is", ".", "</s>"]


def test_only_the_answer_itself_gets_the_blank_and_never_a_second_one() -> None:
    tokenizer = vicuna_tokenizer()
    encoder = ExampleEncoder(tokenizer, 200)

    def learned(answer: ParagraphRecord, *, raw: bool = False) -> str:
        row = encoder.pack(example("Hi", answer, raw=raw))
        ids = [after for after in row.targets if after != IGNORED_TARGET]
        return "".join(tokenizer.convert_ids_to_tokens(ids))

    forked = chain([("One:", ParagraphRecord("detail."))], closing="End")
    assert learned(forked) == "▁One:[Fork]Enddetail.</s></s>"
    assert learned(ParagraphRecord(" Yes")) == "▁Yes</s>"
    assert learned(ParagraphRecord("Yes"), raw=True) == "Yes</s>"
