"""KV events of forked answers: what a subscriber knows of the cache is what the engine has.

The consumer counts copies: vLLM announces a block once for each copy in its cache, and removes each
copy once.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from apar_core.engine.offline_engine import OfflineEngine
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import FLOAT_NOISE, Run, chats, generate_threads, mismatches

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_CHATS = 16
BLOCK_SIZE = 32
END_OF_REPLAY = -1
TIMEOUT_MS = 60_000
WAYS: dict[str, dict[str, Any]] = {
    "long memory": {},
    "short memory": {"num_gpu_blocks_override": 40, "max_num_seqs": 32},
}

Hash = Any  # bytes, or 64 bits of them: what vLLM publishes
Batches = dict[int, KVEventBatch]


@dataclass(frozen=True)
class Hit:
    """Blocks that a thread took over when it was scheduled, after `num_events` events."""

    num_events: int
    is_child: bool
    token_ids: tuple[int, ...]
    block_hashes: tuple[Hash, ...]


@dataclass(frozen=True)
class Observed:
    """What the engine did, and its prefix cache afterwards, with the copies of each block."""

    runs: tuple[Run, Run, Run]
    hits: tuple[Hit, ...]
    cached: Counter[Hash]
    last_batch: int
    child_id: int


@dataclass
class Picture:
    """A consumer's picture of one engine's cache: each block's copies, and the tokens up to it."""

    copies: Counter[Hash]
    prefixes: dict[Hash, tuple[int, ...]]

    def take(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
        elif isinstance(event, BlockStored):
            assert len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes)
            prefix: tuple[int, ...] = ()
            if event.parent_block_hash is not None:
                assert self.copies[event.parent_block_hash] > 0
                prefix = self.prefixes[event.parent_block_hash]
            for index, block_hash in enumerate(event.block_hashes):
                block = event.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                prefix = (*prefix, *block)
                assert self.prefixes.setdefault(block_hash, prefix) == prefix
                self.copies[block_hash] += 1
        else:
            for block_hash in event.block_hashes:
                self.copies[block_hash] -= 1
                assert self.copies[block_hash] >= 0

    def cached_tokens(self, token_ids: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt a router would expect in the cache."""
        known = {self.prefixes[block_hash] for block_hash in +self.copies}
        most = (len(token_ids) - 1) // BLOCK_SIZE
        for number in range(1, most + 1):
            if token_ids[: number * BLOCK_SIZE] not in known:
                return (number - 1) * BLOCK_SIZE
        return most * BLOCK_SIZE


def _observe(engine: OfflineEngine) -> Observed:
    """Answer all chats twice, empty the prefix cache, and answer some again."""
    scheduler, control = engine.scheduler, engine.control_tokens
    assert control is not None
    pool = scheduler.kv_cache_manager.block_pool
    take_events, look_up = pool.take_events, scheduler._get_local_prefix_cache_hit
    num_taken = 0
    hits: list[Hit] = []

    def counted() -> Any:
        nonlocal num_taken
        events = take_events()
        num_taken += len(events)
        return events

    def noted(request: Any, *limit: Any) -> Any:
        found = look_up(request, *limit)
        blocks = found[0].blocks[0][: found[1] // BLOCK_SIZE]
        hashes = [maybe_convert_block_hash(get_block_hash(each.block_hash)) for each in blocks]
        num_events = num_taken + len(pool.kv_event_queue)
        is_child = "~" in request.request_id
        hits.append(Hit(num_events, is_child, tuple(request.all_token_ids), tuple(hashes)))
        return found

    pool.take_events, scheduler._get_local_prefix_cache_hit = counted, noted
    first = generate_threads(engine, chats(NUM_CHATS), 200)
    second = generate_threads(engine, chats(NUM_CHATS), 200)
    assert engine.llm.reset_prefix_cache()
    third = generate_threads(engine, chats(4), 200)
    cached: Counter[Hash] = Counter()
    for block in pool.blocks:
        if block.block_hash is not None:
            cached[maybe_convert_block_hash(get_block_hash(block.block_hash))] += 1
    scheduler.kv_event_publisher._event_queue.join()
    last_batch = scheduler.kv_event_publisher._buffer[-1][0]
    return Observed((first, second, third), tuple(hits), cached, last_batch, control.child_id)


def _received(live: Any, last: int) -> Batches:
    """Return what a subscriber received, up to the last batch."""
    batches: Batches = {}
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    while last not in batches:
        assert live.poll(TIMEOUT_MS), f"batch {last} did not arrive"
        _, number, payload = live.recv_multipart()
        batches[int.from_bytes(number, "big")] = decoder.decode(payload)
    return batches


def _replayed(replay: Any) -> Batches:
    """Ask for everything since the engine's start, as a subscriber does that came late."""
    batches: Batches = {}
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    replay.send_multipart((b"", (0).to_bytes(8, "big")))
    while True:
        assert replay.poll(TIMEOUT_MS), "the replay did not end"
        _, _, number, payload = replay.recv_multipart()
        index = int.from_bytes(number, "big", signed=True)
        if index == END_OF_REPLAY:
            return batches
        batches[index] = decoder.decode(payload)


def _run(folder: Path, arguments: dict[str, Any]) -> tuple[Observed, list[Any]]:
    """Return what the engine did, and all events in order."""
    endpoint, replay_endpoint = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint=replay_endpoint,
    )
    with zmq.Context() as context, context.socket(zmq.SUB) as live:
        live.subscribe(b"")
        live.connect(endpoint)
        engine = EngineProcess(kv_events_config=config, block_size=BLOCK_SIZE, **arguments)
        try:
            observed = engine.call(_observe)
            batches = _received(live, observed.last_batch)
            with context.socket(zmq.DEALER) as replay:
                replay.connect(replay_endpoint)
                everything = _replayed(replay)
        finally:
            engine.close()
    assert batches.items() <= everything.items()
    assert sorted(everything) == list(range(observed.last_batch + 1))
    return observed, [event for number in sorted(everything) for event in everything[number].events]


@pytest.mark.parametrize("way", WAYS)
def test_consumers_picture_is_the_cache(way: str, tmp_path: Path) -> None:
    observed, events = _run(tmp_path, WAYS[way])

    assert all(each.gap < FLOAT_NOISE for run in observed.runs for each in mismatches(run.threads))
    is_short = way == "short memory"
    assert (sum(run.preemptions for run in observed.runs) > 0) == is_short
    assert any(isinstance(event, BlockRemoved) for event in events) == is_short
    picture, at = Picture(Counter(), {}), 0
    inherited = 0
    for hit in observed.hits:
        while at < hit.num_events:
            picture.take(events[at])
            at += 1
        # Whatever a thread takes over was announced, and has not been removed.
        assert all(picture.copies[block_hash] > 0 for block_hash in hit.block_hashes)
        num_tokens = BLOCK_SIZE * len(hit.block_hashes)
        if hit.is_child:
            inherited += num_tokens
        else:
            assert picture.cached_tokens(hit.token_ids) == num_tokens
    for event in events[at:]:
        picture.take(event)

    # Also in numbers: what threads share has one copy, and was announced once.
    assert +picture.copies == observed.cached
    assert inherited > 0
    # Children's own blocks follow those that they share: some block has several successors.
    stored = [event for event in events if isinstance(event, BlockStored)]
    successors: dict[Hash, set[Hash]] = {}
    for event in stored:
        if event.parent_block_hash is not None:
            successors.setdefault(event.parent_block_hash, set()).add(event.block_hashes[0])
    of_children = [event for event in stored if observed.child_id in event.token_ids]
    assert any(event.parent_block_hash is not None for event in of_children)
    assert any(len(hashes) > 1 for hashes in successors.values())
