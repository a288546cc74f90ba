"""Plays a program: generates what its requests ask for, a few tokens of each in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from apar_core.engine.replay import replayed_tokens
from apar_core.offline.data.records import ChatMessage
from apar_core.tree.paragraph import ParagraphTree
from apar_core.tree.restore import restore
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId
from cluster.lab.experiments.program import Program, Submission
from cluster.loadtest.replay_answers import ReplayAnswer

END = 2


def answer_of(tree: ParagraphTree[int]) -> ReplayAnswer:
    """The answer to a question of three tokens."""
    messages = (ChatMessage("user", "How?"),)
    flat = [*restore(tree), END]
    return ReplayAnswer("a", "generic", "How?", messages, (100, 101, 102), {"": flat}, flat, tree)


def nested_answer() -> ReplayAnswer:
    """Two details, the first of which has one of its own.

    In reading order: 10 11 (20 (30 31) 21) 12 (22) 13.
    """
    tree: ParagraphTree[int] = ParagraphTree()
    first, second = ThreadId("root.0"), ThreadId("root.1")
    deep = ThreadId("root.0.0")
    tree.append(ROOT_THREAD, [10, 11])
    tree.fork(ROOT_THREAD, first)
    tree.append(ROOT_THREAD, [12])
    tree.fork(ROOT_THREAD, second)
    tree.append(ROOT_THREAD, [13])
    tree.finish(ROOT_THREAD)
    tree.append(first, [20])
    tree.fork(first, deep)
    tree.append(first, [21])
    tree.append(deep, [30, 31])
    tree.append(second, [22])
    for thread in (first, deep, second):
        tree.finish(thread)
    return answer_of(tree)


def unforked_answer() -> ReplayAnswer:
    tree: ParagraphTree[int] = ParagraphTree()
    tree.append(ROOT_THREAD, [10, 11, 12])
    tree.finish(ROOT_THREAD)
    return answer_of(tree)


class Played:
    """All that a program submitted, in order, and the round in which each request began.

    A round gives every request alive up to `most_tokens` tokens, in random order.
    """

    def __init__(self, program: Program, *, most_tokens: int = 1, seed: int = 0) -> None:
        self.submitted: dict[str, Submission] = {}
        self.begun_in: dict[str, int] = {}
        self.num_rounds = 0
        self._left: dict[str, list[int]] = {}
        self._begin(program.start())
        chance = random.Random(seed)
        while self._left:
            self.num_rounds += 1
            for name in chance.sample(sorted(self._left), len(self._left)):
                self._generate(program, name, chance.randint(1, most_tokens))

    def prompt(self, name: str) -> list[int]:
        return self.submitted[name].prompt_ids

    def script(self, name: str) -> list[int]:
        scripts = replayed_tokens(self.submitted[name].sampling["extra_args"])
        assert list(scripts) == [""]
        return list(scripts[""])

    def _generate(self, program: Program, name: str, number: int) -> None:
        left = self._left[name]
        self._begin(program.on_tokens(name, left[:number]))
        self._left[name] = left[number:]
        if not self._left[name]:
            del self._left[name]
            self._begin(program.on_end(name))

    def _begin(self, submissions: Sequence[Submission]) -> None:
        for each in submissions:
            assert each.name not in self.submitted, f"{each.name} was submitted twice"
            assert each.sampling["extra_args"]["apar_enabled"] is False
            self.submitted[each.name] = each
            self.begun_in[each.name] = self.num_rounds
            self._left[each.name] = self.script(each.name)
            # A request may end at its last token before its limit.
            assert each.sampling["max_tokens"] - len(self._left[each.name]) in (0, 1)
