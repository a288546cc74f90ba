"""Progress of a load test: a bar with live figures on a terminal, periodic lines elsewhere."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.loadtest.client import LoadClient
from cluster.loadtest.run_file import Answered

_REFRESH_S = 0.5
_LINE_EVERY_S = 15.0
_WINDOW_S = 5.0
_LATEST = 200
# Used until a finished answer gives the real ratio.
_CHARACTERS_PER_TOKEN = 4.0


@dataclass(slots=True)
class LiveFigures:
    """Live figures of a running stage; speeds are over the last seconds."""

    client: LoadClient
    clock: Callable[[], float] = time.perf_counter
    ended: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    _first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    _characters: int = 0
    _counted_characters: int = 0
    _tokens: int = 0
    _history: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._history.append((self.clock(), 0))

    def take(self, answered: Answered) -> None:
        """Count a finished request."""
        record = answered.record
        self.ended += 1
        self._characters += len(answered.text)
        if record.error is not None:
            self.errors[record.error] += 1
            return
        self._counted_characters += len(answered.text)
        self._tokens += record.text_tokens
        if record.pieces:
            self._first_token_s.append(record.pieces[0][0])

    def text(self) -> str:
        """Return the figures as one line."""
        under_way = self.client.under_way
        first = f"{statistics.median(self._first_token_s):.2f} s" if self._first_token_s else "-"
        parts = [f"{len(under_way)} running", f"{self._speed():.0f} tokens/s", f"ttft {first}"]
        if self.errors:
            kinds = ", ".join(f"{kind} {count}" for kind, count in self.errors.most_common(3))
            parts.append(f"errors: {kinds}")
        return "  ".join(parts)

    def _speed(self) -> float:
        """Estimate tokens per second from the characters of finished and running answers."""
        running = sum(attempt.stream.characters for attempt in self.client.under_way)
        now = self.clock()
        self._history.append((now, self._characters + running))
        while len(self._history) > 2 and self._history[0][0] < now - _WINDOW_S:
            self._history.popleft()
        (before, had), (_, has) = self._history[0], self._history[-1]
        per_token = (
            self._counted_characters / self._tokens if self._tokens else _CHARACTERS_PER_TOKEN
        )
        return (has - had) / per_token / (now - before) if now > before and per_token else 0.0


class LiveView:
    """Shows the stages of a run below each other."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(
        self, title: str, total: int, client: LoadClient
    ) -> Iterator[Callable[[Answered], None]]:
        """Show a stage during the block; pass every answer to the yielded function.

        Needs a running event loop.
        """
        figures = LiveFigures(client)
        bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            auto_refresh=False,
        )
        task = bars.add_task(title, total=total, figures="")

        def show() -> None:
            bars.update(task, completed=figures.ended, figures=figures.text())
            bars.refresh()

        plain = not self._console.is_terminal

        def line() -> None:
            said = f"{title}: {figures.ended} of {total}  {figures.text()}"
            self._console.print(said, highlight=False)

        repeated = _every(_LINE_EVERY_S, line) if plain else _every(_REFRESH_S, show)
        showing = asyncio.create_task(repeated)
        with bars:
            try:
                yield figures.take
            finally:
                showing.cancel()
                line() if plain else show()

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Show during the block that the final metrics are awaited."""
        said = "waiting for the final metrics of the servers"
        if not self._console.is_terminal:
            self._console.print(said, highlight=False)
            yield
            return
        with self._console.status(said):
            yield


async def _every(seconds: float, act: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        act()
