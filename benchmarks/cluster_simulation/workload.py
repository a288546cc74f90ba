"""Requests for the simulated cluster: recorded answers, at recorded times, with shared prompts.

Made up is only what no record holds: which requests share a beginning. Half of them come from one
of 20 applications, whose popularity follows Zipf's law; each has a system prompt of 100 to 1000
tokens, and its answers are of three categories of the trace (of those with 15 answers or more).
Three of ten continue a conversation, if there is one whose last request came at least 40 s before.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster_simulation.arrivals import ArrivalTrace
from benchmarks.cluster_simulation.threads import SimRequest
from benchmarks.cluster_simulation.trees import AnswerTree
from deployments.wire.request import RequestHint

NUM_APPLICATIONS = 20
SHARE_OF_APPLICATIONS = 0.5
SHARE_OF_CONTINUATIONS = 0.3
SHARE_WITH_LIMIT = 0.3
PAUSE_S = 40.0
MOST_PROMPT_TOKENS = 1400
MOST_FIRST_TOKENS = 1024
MOST_LATER_TOKENS = 100
LIMIT_TOKENS = 2048
LEAST_OF_CATEGORY = 15


@dataclass(frozen=True, slots=True)
class Application:
    """What requests of one application share."""

    number: int
    system_tokens: int
    trees: Sequence[AnswerTree]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation up to the end of its last answer; `pieces` are (hash, tokens up to there)."""

    application: Application | None
    last_s: float
    pieces: tuple[tuple[int, int], ...]


class Workload:
    """Draws requests; equal seeds draw equal requests, whatever serves them."""

    def __init__(self, trees: Sequence[AnswerTree], trace: ArrivalTrace, seed: int) -> None:
        self._trees = trees
        self._trace = trace
        self._random = random.Random(seed)
        self._applications = _applications(trees, random.Random(7))
        self._weights = [1.0 / (each.number + 1) for each in self._applications]
        self._open: deque[Conversation] = deque()
        # Conversations that may go on, the newest of them: people answer soon or never.
        self._ready: deque[Conversation] = deque(maxlen=100)
        self._num_pieces = 0

    def requests(self, number: int, rate: float) -> list[SimRequest]:
        """Return so many requests at a mean rate of `rate` a second."""
        start = self._random.randrange(len(self._trace.gaps_s))
        arrivals = self._trace.arrivals(number, rate, start)
        return [
            self.request(f"r{index}", at_s, prompt_tokens)
            for index, (at_s, prompt_tokens) in enumerate(arrivals)
        ]

    def request(self, request_id: str, at_s: float, recorded_tokens: int) -> SimRequest:
        """Draw the request that comes at a time, with about the recorded length of its prompt."""
        conversation, own_tokens = self._continued(at_s, recorded_tokens)
        if conversation is None:
            conversation, own_tokens = self._begun(at_s, recorded_tokens)
        application = conversation.application
        tree = self._random.choice(self._trees if application is None else application.trees)
        prompt_tokens = own_tokens + (conversation.pieces[-1][1] if conversation.pieces else 0)
        pieces = (*conversation.pieces, (self._new_piece(), prompt_tokens))
        answered = (*pieces, (self._new_piece(), prompt_tokens + tree.text_tokens))
        self._open.append(Conversation(application, at_s, answered))
        hint = self._hint(prompt_tokens, pieces)
        return SimRequest(request_id, at_s, prompt_tokens, tree, hint, pieces)

    def _hint(self, prompt_tokens: int, pieces: tuple[tuple[int, int], ...]) -> RequestHint:
        # A gateway estimates tokens from characters.
        wrong = self._random.uniform(0.85, 1.15)
        limited = self._random.random() < SHARE_WITH_LIMIT
        return RequestHint(
            prompt_tokens=max(1, round(prompt_tokens * wrong)),
            max_tokens=LIMIT_TOKENS if limited else None,
            prefix_hashes=tuple(piece for piece, _ in pieces),
            prefix_tokens=tuple(max(1, round(tokens * wrong)) for _, tokens in pieces),
        )

    def _continued(self, at_s: float, recorded_tokens: int) -> tuple[Conversation | None, int]:
        while self._open and self._open[0].last_s + PAUSE_S <= at_s:
            self._ready.append(self._open.popleft())
        if self._random.random() >= SHARE_OF_CONTINUATIONS or not self._ready:
            return None, 0
        index = self._random.randrange(len(self._ready))
        found = self._ready[index]
        tokens = min(recorded_tokens, MOST_LATER_TOKENS)
        if found.pieces[-1][1] + tokens > MOST_PROMPT_TOKENS:
            return None, 0
        del self._ready[index]
        return found, tokens

    def _begun(self, at_s: float, recorded_tokens: int) -> tuple[Conversation, int]:
        total = min(recorded_tokens, MOST_FIRST_TOKENS)
        if self._random.random() >= SHARE_OF_APPLICATIONS:
            return Conversation(None, at_s, ()), total
        (application,) = self._random.choices(self._applications, self._weights)
        # Hashes of system prompts are negative, those of all other pieces positive.
        system = (-1 - application.number, application.system_tokens)
        return Conversation(application, at_s, (system,)), max(8, total - application.system_tokens)

    def _new_piece(self) -> int:
        self._num_pieces += 1
        return self._num_pieces


def _applications(trees: Sequence[AnswerTree], chosen: random.Random) -> list[Application]:
    by_category: dict[str, list[AnswerTree]] = defaultdict(list)
    for tree in trees:
        by_category[tree.category].append(tree)
    large = [name for name, own in by_category.items() if len(own) >= LEAST_OF_CATEGORY]
    categories = sorted(large or by_category)
    applications = []
    for number in range(NUM_APPLICATIONS):
        own = chosen.sample(categories, min(3, len(categories)))
        own_trees = [tree for category in own for tree in by_category[category]]
        applications.append(Application(number, chosen.randint(100, 1000), own_trees))
    return applications
