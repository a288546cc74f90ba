"""Replay: make an engine generate given tokens, as one thread or as a tree of threads.

For benchmarks and tests: steps, KV blocks, forks and scheduling are real, only the tokens are
given. A replay names the tokens of each thread, fork and end tokens included, by the thread's
replay key: "" for the root thread, "0.2" for the third child of its first child. Where a parent
waits for its children, its tokens before and after each block stand one after the other, without
the joined text.

A client of a server asks for a replay with the field `apar.replay`, which `ReplayRules` checks. The
logits processor `Replay` then reads it from `SamplingParams.extra_args`. Nothing here imports vLLM,
which takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter, ValidationError

from apar_core.errors import RequestError, validation_summary
from apar_core.fork_parameters import ForkParameters
from apar_core.formats.blocks import BlockRules, OpenBlock, split_at_blocks
from apar_core.formats.lists import ListRules
from apar_core.formats.rules import JoinRules
from apar_core.journal import Journal
from apar_core.tree.thread_names import child_replay_key, replay_key_of_path

REPLAY = "apar_core.engine.logits_processors:Replay"
"""Value for vLLM's `logits_processors`, without which an engine does not replay."""
REPLAY_V2 = "apar_core.engine.logits_processors_v2:Replay"
"""The form of it for vLLM's V2 model runner."""
REPLAY_ARG = "apar_replay"
"""Key of `SamplingParams.extra_args`: a replay that the engine core generates."""
REPLAY_REQUEST_ARG = "apar_replay_request"
"""Key of `SamplingParams.extra_args`: a client's field `apar.replay` as JSON text, unchecked."""
PARAM = "apar.replay"

Scripts = Mapping[str, Sequence[int]]
"""Tokens of each thread, by its replay key."""
_SCRIPTS: TypeAdapter[dict[str, list[int]]] = TypeAdapter(dict[str, list[int]])


class ReplayText(str):
    """A replay from this process; no client of a server can send a value of this type."""

    __slots__ = ()


def replay_args(scripts: Scripts) -> dict[str, Any]:
    """Return entries of `extra_args` that make an engine of this process generate the tokens."""
    return {REPLAY_ARG: ReplayText(replay_text(scripts))}


def replay_text(scripts: Scripts) -> str:
    """Return a replay as the engine core reads it: a line "key=token ids" for each thread."""
    lines = (f"{key}={','.join(map(str, ids))}" for key, ids in scripts.items())
    # Each fork copies the parameters, which is cheap for text; each thread reads only its own line.
    return "\n".join(["", *lines, ""])


def replayed_tokens(extra_args: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the scripts that `replay_args` wrote."""
    lines = str(extra_args[REPLAY_ARG]).split("\n")[1:-1]
    return {line.partition("=")[0]: _ids(line.partition("=")[2]) for line in lines}


def thread_script(replay: str, key: str) -> list[int]:
    """Return one thread's tokens from a replay's text; empty if it has none."""
    head = f"\n{key}="
    start = replay.find(head)
    if start < 0:
        return []
    start += len(head)
    return _ids(replay[start : replay.index("\n", start)])


def script_of(extra_args: Mapping[str, Any] | None) -> list[int] | None:
    """Return the tokens that the engine request with these arguments has to generate.

    None if it has no replay.
    """
    if not extra_args or REPLAY_ARG not in extra_args:
        return None
    parameters = ForkParameters.from_extra_args(extra_args)
    if parameters is None:
        return thread_script(extra_args[REPLAY_ARG], "")
    key = replay_key_of_path(parameters.thread_path)
    return thread_script(extra_args[REPLAY_ARG], key)[parameters.num_generated :]


def without_generated(extra_args: dict[str, Any], journal: Journal) -> dict[str, Any]:
    """Return `extra_args` for an engine that resumes a request from a journal.

    That engine counts a thread's tokens anew, so each script starts where the journal ends.
    """
    if REPLAY_ARG not in extra_args:
        return extra_args
    scripts = replayed_tokens(extra_args)
    for delta in journal:
        key = replay_key_of_path(delta.path)
        if key in scripts:
            scripts[key] = scripts[key][len(delta.token_ids) :]
    return {**extra_args, REPLAY_ARG: replay_text(scripts)}


def _ids(text: str) -> list[int]:
    ids: list[int] = json.loads(f"[{text}]")
    return ids


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """Checks of a client's replay against what the engine can generate.

    `end_ids` are the tokens that end a thread. `blocks` are the rules of a format whose threads
    wait for their children.
    """

    vocabulary_size: int
    end_ids: frozenset[int]
    blocks: JoinRules | None = None

    def parse(
        self,
        text: object,
        parameters: ForkParameters | None,
        *,
        prompt_ids: Sequence[int],
        context_tokens: int,
        max_tokens: int | None,
    ) -> dict[str, list[int]]:
        """Return the scripts in a JSON text.

        `parameters` is None for a checkpoint without control tokens. Of `prompt_ids`, only their
        number matters to most formats. Raises RequestError for scripts that the engine could not
        generate completely.
        """
        try:
            scripts = _SCRIPTS.validate_json(str(text), strict=True)
        except ValidationError as error:
            raise _refusal(validation_summary(error)) from error
        is_forking = parameters is not None and parameters.enabled
        rules = self.blocks if is_forking else None
        if isinstance(rules, ListRules):
            raise _refusal("lists cannot be replayed in threads: set `apar.enabled` to false")
        if rules is not None and rules.joins_later:
            raise _refusal(
                "a format whose parent joins cannot be replayed in threads: set `apar.enabled` to "
                "false"
            )
        closing_ids = frozenset() if rules is None else rules.end_ids
        for key, token_ids in scripts.items():
            self._check_thread(key, token_ids, closing_ids if key else frozenset())
        if parameters is None or not is_forking:
            _check_alone(scripts, parameters)
            _check_context(scripts, parameters, len(prompt_ids), context_tokens)
        elif rules is None:
            _check_tree(scripts, parameters)
            _check_context(scripts, parameters, len(prompt_ids), context_tokens)
        else:
            _BlockCheck(scripts, rules, self.end_ids, prompt_ids, context_tokens).run(
                parameters.max_forks
            )
        fork_id = None if parameters is None else parameters.fork_id
        num_closed = sum(bool(key) and ids[-1] in closing_ids for key, ids in scripts.items())
        room_tokens = context_tokens - len(prompt_ids)
        _check_length(scripts, fork_id, num_closed, max_tokens, room_tokens)
        return scripts

    def _check_thread(
        self, key: str, token_ids: Sequence[int], closing_ids: frozenset[int]
    ) -> None:
        if not token_ids:
            raise _refusal(f"thread {key!r} has no token")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocabulary_size:
                raise _refusal(
                    f"thread {key!r} has token id {token_id}, which is not among the model's "
                    f"{self.vocabulary_size}"
                )
        if not self.end_ids:
            return
        end_ids = self.end_ids | closing_ids
        if token_ids[-1] not in end_ids or not end_ids.isdisjoint(token_ids[:-1]):
            raise _refusal(
                f"thread {key!r} must have an end token {sorted(end_ids)} at its end and "
                f"nowhere else"
            )


def _check_alone(scripts: Scripts, parameters: ForkParameters | None) -> None:
    """Check a replay of the root thread alone."""
    others = [key for key in scripts if key]
    if others or "" not in scripts:
        raise _refusal(
            'only the root thread "" can be replayed if the request does not fork'
            + (f", not {others[0]!r}" if others else "")
        )
    for token_id in () if parameters is None else parameters.control_ids:
        if token_id in scripts[""]:
            raise _refusal(
                f"thread '' has the control token {token_id}, but the request does not fork"
            )


def _check_tree(scripts: Scripts, parameters: ForkParameters) -> None:
    """Check that every fork has its thread, and that the engine allows every fork."""
    if "" not in scripts:
        raise _refusal("the root thread '' is missing")
    reached: set[str] = set()
    pending = [""]
    while pending:
        key = pending.pop()
        reached.add(key)
        _check_forks(key, scripts[key], parameters)
        children = _children(key, scripts[key], parameters.fork_id)
        for child in children:
            if child not in scripts:
                raise _refusal(f"thread {child!r} is missing: {key!r} forks {len(children)} times")
            pending.append(child)
    if unknown := sorted(scripts.keys() - reached):
        raise _refusal(f"thread {unknown[0][:80]!r} is not forked by any other")
    if len(scripts) - 1 > parameters.max_forks:
        raise _refusal(f"{len(scripts) - 1} forks exceed the limit of {parameters.max_forks}")


def _check_forks(key: str, token_ids: Sequence[int], parameters: ForkParameters) -> None:
    fork_id = parameters.fork_id
    for banned_id in parameters.banned_ids:
        if banned_id in token_ids:
            raise _refusal(
                f"thread {key!r} has the child token {banned_id}, which no thread generates"
            )
    if fork_id not in token_ids:
        return
    if key and not parameters.children_fork:
        raise _refusal(f"thread {key!r} forks, but in this model's format no child does")
    follows_control = key and token_ids[0] == fork_id
    if follows_control or any(first == fork_id == second for first, second in pairwise(token_ids)):
        raise _refusal(f"thread {key!r} forks right after a control token, before any text")


def _check_context(
    scripts: Scripts, parameters: ForkParameters | None, prompt_tokens: int, context_tokens: int
) -> None:
    """Check that every thread ends within the context."""
    for key, sequence_tokens in _sequence_lengths(scripts, parameters, prompt_tokens):
        if sequence_tokens > context_tokens:
            raise _too_long(key, sequence_tokens, len(scripts[key]), context_tokens)


def _too_long(key: str, sequence_tokens: int, own_tokens: int, context_tokens: int) -> RequestError:
    return _refusal(
        f"thread {key!r} needs {sequence_tokens} tokens, {sequence_tokens - own_tokens} of them "
        f"for the prompt and its ancestors: the model's context holds {context_tokens}"
    )


class _BlockCheck:
    """Check of a replay in which threads wait for their children."""

    def __init__(
        self,
        scripts: Scripts,
        rules: BlockRules,
        end_ids: frozenset[int],
        prompt_ids: Sequence[int],
        context_tokens: int,
    ) -> None:
        self._scripts = scripts
        self._rules = rules
        self._end_ids = end_ids
        self._prompt_ids = prompt_ids
        self._context_tokens = context_tokens
        self._opened: set[str] = set()

    def run(self, max_forks: int) -> None:
        """Raise RequestError unless blocks open and join just as the scripts need it."""
        scripts = self._scripts
        if "" not in scripts:
            raise _refusal("the root thread '' is missing")
        if len(scripts) - 1 > max_forks:
            raise _refusal(f"{len(scripts) - 1} threads exceed the limit of {max_forks}")
        self._text("", list(self._prompt_ids))
        if unknown := sorted(scripts.keys() - self._opened):
            raise _refusal(f"thread {unknown[0][:80]!r} is not opened by any other")

    def _text(self, key: str, sequence: list[int]) -> list[int]:
        """Check a thread after `sequence`; return its text, with the blocks joined inside it."""
        self._opened.add(key)
        script, rules = self._scripts[key], self._rules
        own_start = segment_start = len(sequence)
        start = num_children = 0
        for end, block in self._blocks(key):
            sequence += script[start:end]
            start = end
            if len(sequence) >= self._context_tokens:
                raise _too_long(key, len(sequence), end, self._context_tokens)
            texts: list[list[int]] = []
            for child in block.children:
                inherited: list[int] = []
                if block.num_inherited is not None:
                    inherited = sequence[: segment_start + block.num_inherited]
                child_key = child_replay_key(key, num_children)
                num_children += 1
                if child_key not in self._scripts:
                    raise _refusal(f"thread {child_key!r} is missing, which {key!r} opens")
                texts.append(self._text(child_key, [*inherited, *child.seed]))
            joined = rules.joined(block, sequence[segment_start:], texts)
            if not joined.continues:
                raise _refusal(
                    f"thread {key!r} continues, but one of its children ends without "
                    f"{rules.definition.child_end[0]!r}"
                )
            del sequence[segment_start + joined.num_kept :]
            sequence += joined.token_ids
            segment_start = len(sequence)
        sequence += script[start:]
        if len(sequence) > self._context_tokens:
            raise _too_long(key, len(sequence), len(script), self._context_tokens)
        text = sequence[own_start:]
        return text[:-1] if text[-1] in self._end_ids else text

    def _blocks(self, key: str) -> Iterator[tuple[int, OpenBlock]]:
        if key and not self._rules.nests:
            return iter(())
        return split_at_blocks(
            self._rules,
            self._scripts[key],
            lambda: self._prompt_ids,
            has_ended=True,
            num_children=0,
        )


def _check_length(
    scripts: Scripts,
    fork_id: int | None,
    num_closed: int,
    max_tokens: int | None,
    room_tokens: int,
) -> None:
    """Check that the limit on text tokens lets all threads end.

    `num_closed` threads end with a token that is text. vLLM lowers the limit to `room_tokens`, the
    context without the prompt.
    """
    generated = sum(len(ids) - ids.count(fork_id) for ids in scripts.values())
    # End tokens are not text, but the budget needs room for one, so that the last thread ends.
    wanted = generated - (len(scripts) - num_closed) + 1
    if max_tokens is not None and max_tokens < wanted:
        limit = "`max_tokens`"
        if max_tokens == room_tokens:
            limit = "`max_tokens` or the model's context after the prompt"
        raise _refusal(f"needs {wanted} tokens, more than {limit} allows: {max_tokens}")


def _children(key: str, token_ids: Sequence[int], fork_id: int | None) -> dict[str, int]:
    """Return the keys of a thread's children with the positions of their fork tokens."""
    positions = (position for position, token_id in enumerate(token_ids) if token_id == fork_id)
    return {child_replay_key(key, ordinal): position for ordinal, position in enumerate(positions)}


def _sequence_lengths(
    scripts: Scripts, parameters: ForkParameters | None, prompt_tokens: int
) -> Iterator[tuple[str, int]]:
    """Yield each thread with the length of its sequence, everything it reads included."""
    pending = [("", prompt_tokens)]
    while pending:
        key, read_tokens = pending.pop()
        yield key, read_tokens + len(scripts[key])
        if parameters is None:
            continue
        for child, position in _children(key, scripts[key], parameters.fork_id).items():
            pending.append((child, parameters.num_read(read_tokens + position)))


def _refusal(problem: str) -> RequestError:
    return RequestError(f"`{PARAM}`: {problem}", param=PARAM)
