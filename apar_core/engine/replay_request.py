"""What a client may ask a server to replay: checked before the engine sees it.

A server replays only if its engine has the logits processor `REPLAY`. Nothing here imports vLLM,
which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import TypeAdapter, ValidationError

from apar_core.errors import RequestError, validation_summary
from apar_core.fork_parameters import ForkParameters

REPLAY = "apar_core.engine.replay:Replay"
"""Value for vLLM's `logits_processors`."""
REPLAY_REQUEST_ARG = "apar_replay_request"
"""Key of `SamplingParams.extra_args`: a client's field `apar.replay` as JSON text, unchecked."""
PARAM = "apar.replay"

Scripts = Mapping[str, Sequence[int]]
_SCRIPTS: TypeAdapter[dict[str, list[int]]] = TypeAdapter(dict[str, list[int]])


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """What an engine can generate: its ids, and the tokens that end a thread."""

    vocabulary_size: int
    end_ids: frozenset[int]

    def parse(
        self,
        text: object,
        parameters: ForkParameters | None,
        *,
        prompt_tokens: int,
        context_tokens: int,
        max_tokens: int | None,
    ) -> dict[str, list[int]]:
        """Return the tokens of each thread, from JSON text.

        `parameters` are those of the request, None for a checkpoint without control tokens. Raises
        RequestError for what the engine could not generate whole.
        """
        try:
            scripts = _SCRIPTS.validate_json(str(text), strict=True)
        except ValidationError as error:
            raise _refusal(validation_summary(error)) from error
        for path, token_ids in scripts.items():
            self._check_thread(path, token_ids)
        if parameters is None or not parameters.enabled:
            _check_alone(scripts, parameters)
        else:
            _check_tree(scripts, parameters)
        fork_id = None if parameters is None else parameters.fork_id
        _check_context(scripts, fork_id, prompt_tokens, context_tokens)
        _check_length(scripts, parameters, max_tokens, context_tokens - prompt_tokens)
        return scripts

    def _check_thread(self, path: str, token_ids: Sequence[int]) -> None:
        """Check what concerns one thread and no control token."""
        if not token_ids:
            raise _refusal(f"thread {path!r} has no token")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocabulary_size:
                raise _refusal(
                    f"thread {path!r} has id {token_id}, which is not one of the model's "
                    f"{self.vocabulary_size}"
                )
        if not self.end_ids:
            return
        if token_ids[-1] not in self.end_ids or not self.end_ids.isdisjoint(token_ids[:-1]):
            raise _refusal(
                f"thread {path!r} must have an end token {sorted(self.end_ids)} at its end and "
                f"nowhere else"
            )


def _check_context(
    scripts: Scripts, fork_id: int | None, prompt_tokens: int, context_tokens: int
) -> None:
    """Check that every thread ends within the context, where the engine would cut it off."""
    for path, sequence_tokens in _sequence_lengths(scripts, fork_id, prompt_tokens):
        if sequence_tokens > context_tokens:
            raise _refusal(
                f"thread {path!r} takes {sequence_tokens} tokens, of which "
                f"{sequence_tokens - len(scripts[path])} are the prompt and what it was forked "
                f"from: the model's context holds {context_tokens}"
            )


def _check_alone(scripts: Scripts, parameters: ForkParameters | None) -> None:
    """Check a replay of the root thread alone."""
    others = [path for path in scripts if path]
    if others or "" not in scripts:
        raise _refusal(
            'only the root thread "" can be replayed where the request does not fork'
            + (f", not {others[0]!r}" if others else "")
        )
    control = () if parameters is None else (parameters.fork_id, parameters.child_id)
    for token_id in control:
        if token_id in scripts[""]:
            raise _refusal(
                f"thread '' has the control token {token_id}, but the request does not fork"
            )


def _check_tree(scripts: Scripts, parameters: ForkParameters) -> None:
    """Check that every fork has its thread, and that each fork is one the engine allows."""
    if "" not in scripts:
        raise _refusal("the root thread '' is missing")
    reached: set[str] = set()
    pending = [""]
    while pending:
        path = pending.pop()
        reached.add(path)
        _check_forks(path, scripts[path], parameters)
        children = _children(path, scripts[path], parameters.fork_id)
        for child in children:
            if child not in scripts:
                raise _refusal(f"thread {child!r} is missing: {path!r} forks {len(children)} times")
            pending.append(child)
    if unknown := sorted(scripts.keys() - reached):
        raise _refusal(f"thread {unknown[0][:80]!r} is not forked by any other")
    if len(scripts) - 1 > parameters.max_forks:
        raise _refusal(f"{len(scripts) - 1} forks are over the limit of {parameters.max_forks}")


def _check_forks(path: str, token_ids: Sequence[int], parameters: ForkParameters) -> None:
    fork_id = parameters.fork_id
    if parameters.child_id in token_ids:
        raise _refusal(
            f"thread {path!r} has the child token {parameters.child_id}, which no thread generates"
        )
    if fork_id not in token_ids:
        return
    follows_control = path and token_ids[0] == fork_id
    if follows_control or any(first == fork_id == second for first, second in pairwise(token_ids)):
        raise _refusal(f"thread {path!r} forks right behind a control token, before any text")


def _children(path: str, token_ids: Sequence[int], fork_id: int | None) -> dict[str, int]:
    """Return the paths of a thread's children, and where in its tokens their fork tokens are."""
    prefix = f"{path}." if path else ""
    places = (place for place, token_id in enumerate(token_ids) if token_id == fork_id)
    return {f"{prefix}{ordinal}": place for ordinal, place in enumerate(places)}


def _sequence_lengths(
    scripts: Scripts, fork_id: int | None, prompt_tokens: int
) -> Iterator[tuple[str, int]]:
    """Yield each thread and the tokens of its sequence, all that it reads included."""
    pending = [("", prompt_tokens)]
    while pending:
        path, read_tokens = pending.pop()
        yield path, read_tokens + len(scripts[path])
        for child, place in _children(path, scripts[path], fork_id).items():
            # It reads its parent's fork token too, and then its own child token.
            pending.append((child, read_tokens + place + 2))


def _check_length(
    scripts: Scripts, parameters: ForkParameters | None, max_tokens: int | None, room_tokens: int
) -> None:
    """Check that the limit on tokens, which are those of the text, lets all threads end.

    vLLM lowers it to `room_tokens`, what the context leaves behind the prompt.
    """
    fork_id = None if parameters is None else parameters.fork_id
    generated = sum(len(ids) - ids.count(fork_id) for ids in scripts.values())
    # Every thread ends with a token that is no text; one must fit, so that the last thread ends.
    wanted = generated - len(scripts) + 1
    if max_tokens is not None and max_tokens < wanted:
        limit = "`max_tokens` allows"
        if max_tokens == room_tokens:
            limit = "`max_tokens` or the model's context behind the prompt allows"
        raise _refusal(f"takes {wanted} tokens, more than {limit}: {max_tokens}")


def _refusal(problem: str) -> RequestError:
    return RequestError(f"`{PARAM}`: {problem}", param=PARAM)
