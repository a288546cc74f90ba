"""A recorded answer as token trees: forked, flat, and as scripts of its threads."""

from __future__ import annotations

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.data.records import ParagraphRecord, chain, token_tree
from apar_core.tree import restore
from apar_core.tree.threads import thread_scripts

TOKENS = TreeTokens(fork_id=-1, child_id=-2, end_id=-3)
INNER = chain([("c", ParagraphRecord("dd"))], closing="e")
ANSWER = chain([("a", ParagraphRecord("bb")), ("f", INNER)], closing="g")


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_the_tree_restores_to_the_answer_and_every_thread_ends() -> None:
    tree = token_tree(ANSWER, encode)

    assert restore(tree) == encode("abbfcddeg")
    assert [record.depth for record in tree.threads.values()] == [0, 1, 1, 2]
    assert all(record.ended for record in tree.threads.values())


def test_each_thread_has_its_script_with_forks_and_end() -> None:
    assert thread_scripts(token_tree(ANSWER, encode), TOKENS.fork_id, TOKENS.end_id) == {
        "": [ord("a"), -1, ord("f"), -1, ord("g"), -3],
        "0": [*encode("bb"), -3],
        "1": [ord("c"), -1, ord("e"), -3],
        "1.0": [*encode("dd"), -3],
    }
