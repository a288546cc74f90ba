"""Requests for a simulated cluster: recorded answers, at recorded times, with shared prompts.

Answers come from trace files, as tokens. Arrivals and prompt lengths come from a recorded service,
scaled to a rate with bursts kept. Without a file, arrivals are a Poisson process, and prompts are
as long as those of the traces.

No recording says which requests share a prefix, so shared prefixes are synthetic. Half of the
requests come from one of 20 applications, whose popularity follows Zipf's law. Each has a system
prompt of 100 to 1000 tokens and answers from three categories of the trace. Three in ten requests
continue a conversation whose last request came at least 40 s earlier, if there is one. Their prompt
is the conversation so far, including the restored answer, so that the engines' prefix caches find
what a real one would.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from apar_core.errors import EvaluationError
from apar_core.formats.lists import ListRules
from apar_core.formats.shipped_formats import LISTS
from apar_core.tree.statistics import tree_statistics
from cluster.lab.virtual.core import VirtualRequest
from cluster.lab.virtual.list_answers import ListAnswer, list_answer
from cluster.lab.virtual.text import TEXT_IDS, virtual_text
from cluster.loadtest.arrivals import GammaArrivals, read_timestamps
from cluster.loadtest.replay_answers import ReplayAnswer, replay_answer
from cluster.loadtest.trace import read_trace
from deployments.wire.request import RequestHint
from deployments.wire.response import ResponseEnd

NUM_APPLICATIONS = 20
SHARE_OF_APPLICATIONS = 0.5
SHARE_OF_CONTINUATIONS = 0.3
SHARE_WITH_LIMIT = 0.3
PAUSE_S = 40.0
MAX_PROMPT_TOKENS = 1400
MAX_FIRST_TOKENS = 1024
MAX_LATER_TOKENS = 100
LIMIT_TOKENS = 2048
LEAST_OF_CATEGORY = 15
CONTEXT_TOKENS = 4096
"""Context length of the simulated engines; longer than any prompt with its answer."""

_PROMPT_COLUMN = "ContextTokens"
# Size of the random token pool that prompts are cut from; two cuts share a block only by chance.
_POOL_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class Answer:
    """A recorded answer as token ids, by thread and as one thread.

    critical_tokens: steps until the last thread ends if none ever waits.
    attended_tokens, flat_attended_tokens: tokens of the answer that its tokens attend to, summed
        over these, by thread and as one thread; the prompt comes on top for each token.
    listed: the answer as an engine that writes lists in parallel generates it, if it was asked for.
    """

    category: str
    threads: dict[str, list[int]]
    flat: list[int]
    prompt_tokens: int
    critical_tokens: int
    attended_tokens: int = 0
    flat_attended_tokens: int = 0
    listed: ListAnswer | None = None

    @property
    def text_tokens(self) -> int:
        """Tokens of the restored text."""
        return len(self.flat) - 1

    def end(self, prompt_tokens: int, *, forked: bool) -> ResponseEnd:
        """Return the cost that a replica reports for the whole answer."""
        scripts = self.threads if forked else {"": self.flat}
        return ResponseEnd(
            prompt_tokens=prompt_tokens,
            generated_tokens=sum(map(len, scripts.values())),
            threads=len(scripts),
            forks=len(scripts) - 1,
            critical_path_tokens=self.critical_tokens if forked else len(self.flat),
        )


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of the workload; the router sees only its hint.

    `pieces` make up the prompt: each is (first index, number of tokens) in the token pool, or an
    earlier answer.
    in_lists: the engine writes the answer's lists in parallel.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    pieces: tuple[tuple[int, int] | Answer, ...]
    answer: Answer
    hint: RequestHint
    forked: bool = True
    in_lists: bool = False

    def virtual_request(self, prompt_ids: list[int], arrival_s: float) -> VirtualRequest:
        """Return the request for an engine core."""
        if self.in_lists:
            assert self.answer.listed is not None
            listed = replace(self.answer.listed, prompt_tokens=len(prompt_ids))
            return VirtualRequest(
                self.request_id, prompt_ids, {}, len(listed.flat), True, arrival_s, listed
            )
        scripts = self.answer.threads if self.forked else {"": self.answer.flat}
        return VirtualRequest(
            self.request_id, prompt_ids, scripts, len(self.answer.flat), self.forked, arrival_s
        )


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """Gaps between requests in seconds, and the prompt tokens of each, in the recorded order."""

    gaps_s: tuple[float, ...]
    prompt_tokens: tuple[int, ...]

    def take(self, number: int, rate: float, start: int) -> list[tuple[float, int]]:
        """Return (time, prompt tokens) of `number` requests from the `start`-th on, cyclically.

        The gaps are scaled to a mean rate of `rate` per second, which keeps bursts.
        """
        size = len(self.gaps_s)
        gaps = [self.gaps_s[(start + index) % size] for index in range(number)]
        scale = number / rate / sum(gaps)
        now_s, taken = 0.0, []
        for index, gap in enumerate(gaps):
            now_s += gap * scale
            taken.append((now_s, self.prompt_tokens[(start + index) % size]))
        return taken


@dataclass(frozen=True, slots=True)
class RecordedData:
    """The answers and arrivals that all requests are drawn from; `arrivals` None for Poisson."""

    answers: Sequence[Answer]
    arrivals: RecordedArrivals | None

    def workload(self, seed: int) -> Workload:
        """Return a source of requests."""
        return Workload(self, seed)


def read_data(
    traces: Sequence[Path], arrivals: Path | None, *, lists: bool = False
) -> RecordedData:
    """Read trace files, and a table of TIMESTAMP and ContextTokens in Azure's published format.

    `lists`: also as an engine that writes lists in parallel generates the answers. Raises
    EvaluationError for a missing or invalid file.
    """
    text = virtual_text()
    tokens = text.tokens
    lines = [line for path in traces for line in read_trace(path)]
    answers = [_answer(replay_answer(line, text, tokens)) for line in lines]
    if lists:
        # Imports transformers, which takes seconds.
        from apar_core.offline.evaluation.replay_text import LLAMA_TOKENIZER, load_text

        # The format reads text, so these tokens are those of Llama's vocabulary.
        llama = load_text(LLAMA_TOKENIZER)
        rules = ListRules(LISTS, llama.tokenizer)
        answers = [
            replace(each, listed=list_answer(line.response, rules, 0, llama.end_id))
            for each, line in zip(answers, lines, strict=True)
        ]
    answers = [each for each in answers if len(each.flat) + MAX_PROMPT_TOKENS < CONTEXT_TOKENS]
    return RecordedData(answers, None if arrivals is None else _read_arrivals(arrivals))


def _answer(answer: ReplayAnswer) -> Answer:
    statistics = tree_statistics(answer.tree, 0)
    return Answer(
        answer.category,
        dict(answer.threads),
        answer.flat,
        len(answer.prompt_ids),
        statistics.decode_steps,
        statistics.attended_tokens,
        statistics.sequential_attended_tokens,
    )


def _read_arrivals(path: Path) -> RecordedArrivals:
    times = read_timestamps(path)
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    try:
        prompts = [max(1, int(row[_PROMPT_COLUMN])) for row in rows[1:]]
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationError(f"{path} has no column {_PROMPT_COLUMN} of whole numbers") from error
    gaps = [max(0.0, after - before) for before, after in pairwise(times)]
    if not any(gaps):
        raise EvaluationError(f"{path}: the {len(times)} recorded times have no gap between them")
    return RecordedArrivals(tuple(gaps), tuple(prompts))


@dataclass(frozen=True, slots=True)
class _Application:
    number: int
    system: tuple[int, int]
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A conversation up to its last answer; hashes and tokens of the prefix up to each piece."""

    application: _Application | None
    last_s: float
    pieces: tuple[tuple[int, int] | Answer, ...]
    hashes: tuple[int, ...]
    tokens: tuple[int, ...]


class Workload:
    """Source of random requests; equal seeds give equal requests, whatever serves them."""

    def __init__(self, data: RecordedData, seed: int) -> None:
        self._data = data
        self._random = random.Random(seed)
        self._applications = _applications(data.answers, random.Random(7))
        self._weights = [1.0 / (each.number + 1) for each in self._applications]
        self._open: deque[_Conversation] = deque()
        # The newest conversations that may continue: people reply soon or never.
        self._ready: deque[_Conversation] = deque(maxlen=100)
        self._num_hashes = 0

    def requests(
        self,
        stages: Sequence[tuple[float, float]],
        *,
        forked: bool = True,
        in_lists: bool = False,
    ) -> list[SimRequest]:
        """Return the requests of consecutive stages (seconds, requests per second)."""
        times: list[tuple[float, int | None]] = []
        begin_s = 0.0
        for seconds, rate in stages:
            number = max(1, round(seconds * rate))
            times += [(begin_s + at_s, tokens) for at_s, tokens in self._arrivals(number, rate)]
            begin_s += seconds
        requests = [
            self._request(f"r{index}", at_s, tokens, forked)
            for index, (at_s, tokens) in enumerate(times)
        ]
        return [replace(each, in_lists=True) for each in requests] if in_lists else requests

    def _arrivals(self, number: int, rate: float) -> list[tuple[float, int | None]]:
        recorded = self._data.arrivals
        if recorded is None:
            seed = self._random.randrange(1 << 30)
            return [(at_s, None) for at_s in GammaArrivals(rate).times_s(number, seed)]
        return list(recorded.take(number, rate, self._random.randrange(len(recorded.gaps_s))))

    def _request(
        self, request_id: str, at_s: float, recorded_tokens: int | None, forked: bool
    ) -> SimRequest:
        before, own_tokens = self._continued(at_s, recorded_tokens)
        if before is None:
            before, own_tokens = self._begun(at_s, recorded_tokens)
        application = before.application
        answer = self._random.choice(
            self._data.answers if application is None else application.answers
        )
        prompt_tokens = own_tokens + (before.tokens[-1] if before.tokens else 0)
        pieces = (*before.pieces, self._cut(own_tokens))
        hashes = (*before.hashes, self._new_hash())
        tokens = (*before.tokens, prompt_tokens)
        self._open.append(
            _Conversation(
                application,
                at_s,
                (*pieces, answer),
                (*hashes, self._new_hash()),
                (*tokens, prompt_tokens + answer.text_tokens),
            )
        )
        hint = self._hint(hashes, tokens, forked)
        return SimRequest(request_id, at_s, prompt_tokens, pieces, answer, hint, forked)

    def _hint(self, hashes: tuple[int, ...], tokens: tuple[int, ...], forked: bool) -> RequestHint:
        # A gateway only estimates token counts, from characters.
        wrong = self._random.uniform(0.85, 1.15)
        limited = self._random.random() < SHARE_WITH_LIMIT
        return RequestHint(
            prompt_tokens=max(1, round(tokens[-1] * wrong)),
            max_tokens=LIMIT_TOKENS if limited else None,
            prefix_hashes=hashes,
            may_fork=forked,
            prefix_tokens=tuple(max(1, round(each * wrong)) for each in tokens),
        )

    def _continued(
        self, at_s: float, recorded_tokens: int | None
    ) -> tuple[_Conversation | None, int]:
        while self._open and self._open[0].last_s + PAUSE_S <= at_s:
            self._ready.append(self._open.popleft())
        if self._random.random() >= SHARE_OF_CONTINUATIONS or not self._ready:
            return None, 0
        index = self._random.randrange(len(self._ready))
        found = self._ready[index]
        tokens = min(recorded_tokens or MAX_LATER_TOKENS, MAX_LATER_TOKENS)
        if found.tokens[-1] + tokens > MAX_PROMPT_TOKENS:
            return None, 0
        del self._ready[index]
        return found, tokens

    def _begun(self, at_s: float, recorded_tokens: int | None) -> tuple[_Conversation, int]:
        if recorded_tokens is None:
            recorded_tokens = self._random.choice(self._data.answers).prompt_tokens
        total = min(recorded_tokens, MAX_FIRST_TOKENS)
        if self._random.random() >= SHARE_OF_APPLICATIONS:
            return _Conversation(None, at_s, (), (), ()), total
        (application,) = self._random.choices(self._applications, self._weights)
        system = application.system
        # Hashes of system prompts are negative, those of all other pieces positive.
        begun = _Conversation(application, at_s, (system,), (-1 - application.number,), system[1:])
        return begun, max(8, total - system[1])

    def _cut(self, num_tokens: int) -> tuple[int, int]:
        return self._random.randrange(_POOL_TOKENS - MAX_PROMPT_TOKENS), num_tokens

    def _new_hash(self) -> int:
        self._num_hashes += 1
        return self._num_hashes


def _applications(answers: Sequence[Answer], chosen: random.Random) -> list[_Application]:
    by_category: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_category[answer.category].append(answer)
    large = [name for name, own in by_category.items() if len(own) >= LEAST_OF_CATEGORY]
    categories = sorted(large or by_category)
    applications = []
    for number in range(NUM_APPLICATIONS):
        own = chosen.sample(categories, min(3, len(categories)))
        own_answers = [answer for category in own for answer in by_category[category]]
        first = chosen.randrange(_POOL_TOKENS - MAX_PROMPT_TOKENS)
        applications.append(_Application(number, (first, chosen.randint(100, 1000)), own_answers))
    return applications


class PromptTokens:
    """Token ids of prompts, created when a request is sent: all at once would take gigabytes."""

    def __init__(self) -> None:
        self._pool = random.Random(1).choices(TEXT_IDS, k=_POOL_TOKENS)

    def of(self, request: SimRequest) -> list[int]:
        """Return the prompt of a request; equal pieces give equal tokens."""
        prompt: list[int] = []
        for piece in request.pieces:
            if isinstance(piece, Answer):
                listed = piece.listed if request.in_lists else None
                prompt += (piece if listed is None else listed).flat[:-1]
            else:
                first, num_tokens = piece
                prompt += self._pool[first : first + num_tokens]
        return prompt
