"""Threads of a request whose lists are written in parallel (`formats/lists.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apar_core.engine.block_threads import BlockThreads
from apar_core.engine.thread_outputs import RequestThreads, TextToken, plain_token
from apar_core.formats.blocks import OpenBlock
from apar_core.formats.lists import HeadThread
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId, child_thread
from apar_core.vllm_names import EngineCoreOutput, FinishReason


class ListThreads(BlockThreads):
    """Reads lists from the threads of one request.

    A token enters the tree when it is certain to be text: what a detail writes after its last line
    may be the next item, and a head is part of the list once it has ended. A detail that ends its
    list removes the threads of later items from the tree.
    """

    def __init__(self, *args: Any, max_tokens: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_left = max_tokens
        self._readers: dict[ThreadId, Any] = {ROOT_THREAD: self._rules.root_reader(self._prompt)}
        # Tokens that a thread has generated, and that may not be text.
        self._uncertain: dict[ThreadId, list[TextToken]] = {}
        self._num_taken: dict[ThreadId, int] = {}

    def feed(self, output: EngineCoreOutput) -> Sequence[str]:
        """Add one thread's output; return the engine request ids of its new children."""
        thread = self._threads[output.request_id]
        if self.tree.threads[thread].discarded:
            if self.follower is not None:
                self.follower.add(output)
            return ()
        return super().feed(output)

    def take(self) -> list[EngineCoreOutput]:
        """Return what became certain; the text ends at `max_tokens`, as in one thread."""
        outputs = super().take()
        if self._num_left is None:
            return outputs
        taken: list[EngineCoreOutput] = []
        for output in outputs:
            number = len(output.new_token_ids)
            if number >= self._num_left and number:
                return [*taken, self._shortened(output, self._num_left)]
            self._num_left -= number
            taken.append(output)
        return taken

    @staticmethod
    def _shortened(output: EngineCoreOutput, number: int) -> EngineCoreOutput:
        """Return an output that ends the answer by length after so many of its tokens."""
        is_stop = output.finish_reason is not None and number == len(output.new_token_ids)
        if is_stop:  # A stop token of the client is the last token.
            return output
        output.new_token_ids = output.new_token_ids[:number]
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(0, number)
        if output.new_sampling_mask is not None:
            output.new_sampling_mask = output.new_sampling_mask.slice_request(0, number)
        output.finish_reason, output.stop_reason = FinishReason.LENGTH, None
        return output

    def _feed_tokens(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> list[str]:
        """Add the tokens of one output; return the engine request ids of its new children."""
        token_ids = output.new_token_ids
        num_text = len(token_ids) - ended
        reader = self._readers[thread]
        children: list[str] = []
        for index, token in enumerate(self._text_tokens(output, 0, num_text)):
            self._join(thread)
            self._uncertain.setdefault(thread, []).append(token)
            block = reader.read(token.token_id, list)
            self._take_certain(thread, reader)
            # The token with which a thread ends opens no block.
            is_last = output.finish_reason is not None and index == len(token_ids) - 1
            if isinstance(block, OpenBlock) and not is_last:
                children += self._open(output.request_id, thread, block, [])
                names = self._waiting[thread][2]
                readers = self._rules.child_readers(block, self._prompt)
                for name, child_reader in zip(names, readers, strict=True):
                    self._readers[name] = child_reader
                    node = self.tree.threads[name].current_node
                    node.held = isinstance(child_reader, HeadThread)
        if ended:
            # An end token may be all that a thread generates after a join.
            self._join(thread)
        return children

    def _take_certain(self, thread: ThreadId, reader: Any) -> None:
        """Move the tokens that are certainly text to the tree."""
        uncertain = self._uncertain[thread]
        taken = self._num_taken.get(thread, 0)
        number = len(uncertain) if reader.num_certain is None else reader.num_certain - taken
        if number > 0:
            self.tree.threads[thread].current_node.held = False
            self.tree.append(thread, uncertain[:number])
            del uncertain[:number]
            self._num_taken[thread] = taken + number

    def _finish(self, thread: ThreadId, output: EngineCoreOutput, *, ended: bool) -> None:
        # Not that of `BlockThreads`, which closes children with the format's own text.
        if self._waiting.pop(thread, None) is not None:
            RequestThreads._finish(self, thread, output, ended=ended)
            return
        reader = self._readers[thread]
        # A stop token of the client ends the whole answer, wherever it stands.
        stops = not ended and isinstance(output.stop_reason, int)
        is_text = reader.ends((), itself=ended) is not None or stops
        uncertain = self._uncertain.pop(thread, [])
        num_kept = len(uncertain)
        if not stops:
            taken = self._num_taken.get(thread, 0)
            num_kept = reader.num_text(taken + len(uncertain)) - taken
        self.tree.threads[thread].current_node.held &= not stops
        self.tree.append(thread, uncertain[:num_kept])
        self.tree.discarded_tokens += len(uncertain) - num_kept
        if reader.closing_ids:
            closing = [plain_token(token_id) for token_id in reader.closing_ids]
            self.tree.close_child(thread, closing, is_closed=True)
        RequestThreads._finish(self, thread, output, ended=ended)
        parent = self.tree.threads[thread].parent
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT) or parent is None:
            return
        if not is_text:
            self._discard(thread)
        elif reader.ends_list:
            ordinal = self.tree.threads[parent].children.index(thread)
            self._discard(child_thread(parent, ordinal + 1))

    def _discard(self, thread: ThreadId) -> None:
        """Remove a thread and all below it from the text."""
        for name in self.tree.discard(thread):
            self.tree.discarded_tokens += len(self._uncertain.pop(name, ()))
            if self.tags is not None:
                self.tags.discard(name)
