"""Runs of replayed requests in any engine, real or virtual, recorded step by step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.replay import replay_args

# vLLM appends eight random digits to the id of each request.
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}(?=~|$)")
FORK = -1
"""Stands for the checkpoint's fork token in a script; a thread ends with its end token."""
FIRST_TEXT_ID = 300


@dataclass(frozen=True)
class Asked:
    """A request: its prompt, its threads by replay key, and when it comes and is aborted."""

    prompt_tokens: int
    scripts: Mapping[str, Sequence[int]]
    forks: bool = True
    n: int = 1
    max_threads: int | None = None
    max_tokens: int = 1000
    at_step: int = 0
    abort_at_step: int | None = None

    @property
    def text(self) -> list[int]:
        """The answer: paragraphs in reading order."""
        return _read(self.scripts, "") if self.forks else list(self.scripts[""])


@dataclass(frozen=True)
class StepSeen:
    """One step: rows with (name, computed before, computed in it), and what it changed.

    forks: forks accepted, delayed and refused since the start.
    """

    rows: tuple[tuple[str, int, int], ...]
    preempted: tuple[str, ...]
    copied_blocks: int
    forks: tuple[int, ...]
    free_blocks: int


@dataclass(frozen=True)
class RunSeen:
    """The steps of a run, the tokens and finish reasons of its answers, and free blocks around it.

    end_s: the engine's virtual clock; None for a real one.
    """

    steps: list[StepSeen]
    answers: dict[str, list[tuple[tuple[int, ...], str | None]]]
    free_before: int
    free_after: int
    end_s: float | None = None


@dataclass
class _Recorder:
    steps: list[StepSeen] = field(default_factory=list)


def run(engine: OfflineEngine, asked: Sequence[Asked], *, kv_blocks: int | None = None) -> RunSeen:
    """Answer requests with at most so many KV blocks, and record every step."""
    scheduler, llm_engine = engine.scheduler, engine.llm.llm_engine
    assert scheduler.reset_prefix_cache()
    pool = scheduler.kv_cache_manager.block_pool
    free_before = pool.get_num_free_blocks()
    ballast = pool.get_new_blocks(0 if kv_blocks is None else free_before - kv_blocks)
    counters = scheduler.admission.counters
    before = (counters.accepted, sum(counters.delayed.values()), counters.refused)
    recorder = _Recorder()
    schedule = scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        computed = {request.request_id: request.num_computed_tokens for request in _all(scheduler)}
        step = schedule(*args, **kwargs)
        # What a new or resumed row shares with others counts as computed before.
        computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        now = (counters.accepted, sum(counters.delayed.values()), counters.refused)
        if step.num_scheduled_tokens:
            recorder.steps.append(
                StepSeen(
                    rows=tuple(
                        (_plain(name), computed[name], number)
                        for name, number in step.num_scheduled_tokens.items()
                    ),
                    preempted=tuple(sorted(map(_plain, step.preempted_req_ids or ()))),
                    copied_blocks=len(step.kv_cache_block_copies or ()),
                    forks=tuple(new - old for new, old in zip(now, before, strict=True)),
                    free_blocks=pool.get_num_free_blocks(),
                )
            )
        return step

    scheduler.schedule = recorded
    try:
        answers = _drive(engine, llm_engine, asked)
    finally:
        scheduler.schedule = schedule
        pool.free_blocks(ballast)
    # The scheduler forgets aborted requests with its next step.
    while scheduler.has_requests():
        llm_engine.step()
    device = getattr(engine, "device", None)
    return RunSeen(
        recorder.steps,
        answers,
        free_before,
        pool.get_num_free_blocks(),
        None if device is None else device.clock.now_s,
    )


def _drive(engine: OfflineEngine, llm_engine: Any, asked: Sequence[Asked]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    answers: dict[str, Any] = {}
    num_steps = 0
    left = list(enumerate(asked))
    while left or llm_engine.has_unfinished_requests():
        for number, each in [pair for pair in left if pair[1].at_step <= num_steps]:
            params = SamplingParams(
                temperature=0.0 if each.n == 1 else 1.0,
                n=each.n,
                max_tokens=each.max_tokens,
                detokenize=False,
                # All completions of a request in one output.
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=_extra_args(engine, each),
            )
            prompt = [FIRST_TEXT_ID + number] * each.prompt_tokens
            llm_engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, params)
        left = [pair for pair in left if pair[1].at_step > num_steps]
        llm_engine.abort_request(
            [f"r{number}" for number, each in enumerate(asked) if each.abort_at_step == num_steps]
        )
        for output in llm_engine.step():
            if output.finished:
                answers[output.request_id] = [
                    (tuple(each.token_ids), each.finish_reason) for each in output.outputs
                ]
        num_steps += 1
    return answers


def _extra_args(engine: OfflineEngine, asked: Asked) -> dict[str, Any]:
    control = engine.control_tokens
    assert control is not None
    end_id = engine.tokenizer.eos_token_id
    scripts = {
        key: [*(control.fork_id if token == FORK else token for token in tokens), end_id]
        for key, tokens in asked.scripts.items()
    }
    limits = {} if asked.max_threads is None else {"apar_max_threads": asked.max_threads}
    return {**replay_args(scripts), "apar_enabled": asked.forks, **limits}


def _all(scheduler: Any) -> list[Any]:
    return list(scheduler.requests.values())


def _plain(name: str) -> str:
    return _RANDOM_SUFFIX.sub("", name)


def _read(scripts: Mapping[str, Sequence[int]], key: str) -> list[int]:
    text: list[int] = []
    ordinal = 0
    for token in scripts[key]:
        if token == FORK:
            text += _read(scripts, f"{key}.{ordinal}" if key else str(ordinal))
            ordinal += 1
        else:
            text.append(token)
    return text


@st.composite
def trees(draw: st.DrawFn, *, depth: int = 2, most_tokens: int = 12) -> dict[str, list[int]]:
    """Draw the threads of a tree, by replay key."""
    scripts: dict[str, list[int]] = {}
    texts = st.lists(st.integers(FIRST_TEXT_ID, 400), min_size=1, max_size=most_tokens)

    def thread(key: str, level: int) -> None:
        tokens = list(draw(texts))
        for ordinal in range(draw(st.integers(0, 3)) if level < depth else 0):
            tokens += [FORK, *draw(texts)]
            thread(f"{key}.{ordinal}" if key else str(ordinal), level + 1)
        scripts[key] = tokens

    thread("", 0)
    return scripts


def requests(**limits: Any) -> st.SearchStrategy[list[Asked]]:
    """Draw requests that come and are aborted at any time."""
    asked = st.builds(
        Asked,
        prompt_tokens=st.integers(1, 40),
        scripts=trees(),
        n=st.sampled_from([1, 1, 2]),
        max_threads=st.sampled_from([None, 1, 2, 3]),
        at_step=st.integers(0, 12),
        abort_at_step=st.sampled_from([None, None, None, 3, 9, 20]),
    )
    return st.lists(asked, **{"min_size": 1, "max_size": 6, **limits})
