"""The rows of the dashboard of forks."""

from dashboards.grafana.board import Board, Row
from dashboards.grafana.forks import cache, engine, savings, threads


def forks() -> Board:
    """Threads, forks, what they save, and the blocks of the KV cache."""
    return Board(
        uid="apar-forks",
        title="APAR / Forks and KV cache",
        description="Threads, forks, what they save, and the blocks of the KV cache.",
        rows=(
            Row("Over the whole range", savings.totals()),
            Row("Threads and forks", threads.panels()),
            Row("Against sequential decoding", savings.over_time()),
            Row("KV cache", cache.panels()),
            Row("Engine", engine.panels()),
        ),
    )
