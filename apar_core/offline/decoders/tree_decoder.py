"""Decoding of one answer: threads are rows of a batch, and a fork copies a row.

Source: APAR (arXiv 2401.06761), algorithm 1 and appendix C.1. Each row gains one
token per pass, plus accepted candidates if there are Medusa heads.
Dimensions: R rows, Q nodes of a row, T tokens held, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.decoders.interface import StepRecord, TokenChoice
from apar_core.offline.decoders.row_cache import RowCache
from apar_core.offline.decoders.thread_family import Thread, ThreadFamily
from apar_core.offline.decoders.token_chooser import ChosenTokens, TypicalAcceptance, choose_tokens
from apar_core.offline.speculation.candidate_tree import CandidateTree, candidate_tree
from apar_core.offline.speculation.medusa_heads import MedusaHeads


@dataclass(frozen=True, slots=True)
class DecodingModel:
    """Transformers model with tokens, Medusa heads and acceptance.

    `tokens` is None for a model without control tokens, `heads` without speculation. `forks` tells
    whether fork tokens may be sampled. `top_k` has the candidates of each head.
    """

    model: Any
    tokens: TreeTokens | None
    forks: bool
    heads: MedusaHeads | None
    top_k: tuple[int, ...]
    acceptance: TypicalAcceptance


@dataclass(eq=False, slots=True)
class Row:
    """Thread in the batch, with `length` cached tokens and the `pending` token to compute next.

    `child` opens after the pending fork token in the next pass. `waiting` needs a copy of the row
    once that token is computed. `source` is the node of the last pass that predicted `pending`, for
    the heads; None for a child token, which was not predicted.
    """

    thread: Thread
    length: int
    pending: int
    child: Thread | None = None
    waiting: Thread | None = None
    source: int | None = None

    @property
    def carries(self) -> bool:
        """Whether the row must stay in the batch for its own thread or for a fork."""
        return self.thread.alive or self.child is not None or self.waiting is not None


class AnswerRun:
    """State of one answer; dropping it frees the cache."""

    def __init__(
        self, model: DecodingModel, family: ThreadFamily, choice: TokenChoice, prompt: list[int]
    ) -> None:
        self._model = model
        self._family = family
        self._choice = choice
        self._device = model.model.device
        self.cache = RowCache(model.model.config.num_hidden_layers, self._device)
        self.cache.reserve(4 if model.forks else 1, len(prompt) + 64)
        self.rows = [Row(family.root, len(prompt) - 1, prompt[-1])]
        self._prompt: list[int] | None = prompt
        self._saved: dict[Thread, list[Tensor]] = {}
        self._hidden_ND: Tensor | None = None
        self._num_passes = 0
        self._trees = {
            (heads, child): candidate_tree(model.top_k if heads else (), opens_child=child)
            for heads in (False, True)
            for child in (False, True)
        }
        self._visible = {key: tree.visible().to(self._device) for key, tree in self._trees.items()}
        self._offsets = {
            key: torch.tensor(tree.depths, device=self._device) for key, tree in self._trees.items()
        }

    @torch.inference_mode()
    def step(self) -> StepRecord:
        """Run one pass and assign its tokens to threads."""
        start = time.perf_counter()
        key, chosen = self._run_pass()
        readers = [row.thread for row in self.rows if row.thread.alive]
        readers += [row.child for row in self.rows if row.child is not None]
        cached = self._family.cached_tokens(readers)
        before = [(thread, thread.path_length) for thread in readers]
        self._hand_out(self._trees[key], chosen)
        self._num_passes += 1
        num_tokens = attended = 0
        for thread, length in before:
            gained = thread.path_length - length + thread.ended
            num_tokens += gained
            attended += gained * length + gained * (gained - 1) // 2
        seconds = time.perf_counter() - start
        return StepRecord(self._num_passes, len(readers), num_tokens, seconds, cached, attended)

    def _run_pass(self) -> tuple[tuple[bool, bool], ChosenTokens]:
        proposing = self._model.heads is not None and self._hidden_ND is not None
        key = (proposing, any(row.child is not None for row in self.rows))
        tree = self._trees[key]
        tokens_RQ = self._tokens(tree)
        if self._prompt is not None:
            logits_RQV = self._prefill(self._prompt)
            self._prompt = None
        else:
            logits_RQV = self._forward(tokens_RQ, key)
        self._ban(logits_RQV, tokens_RQ)
        return key, choose_tokens(
            logits_RQV, tokens_RQ, tree, self._choice, self._model.acceptance, self._uniforms(tree)
        )

    def _tokens(self, tree: CandidateTree) -> Tensor:
        columns = [torch.tensor([[row.pending] for row in self.rows], device=self._device)]
        if tree.num_candidates:
            columns.append(self._proposals(tree))
        if tree.opens_child and self._model.tokens is not None:
            columns.append(torch.full_like(columns[0], self._model.tokens.child_id))
        return torch.cat(columns, 1) if len(columns) > 1 else columns[0]

    def _proposals(self, tree: CandidateTree) -> Tensor:
        heads = self._model.heads
        assert heads is not None
        assert self._hidden_ND is not None
        sources = torch.tensor([row.source or 0 for row in self.rows], device=self._device)
        widest = max(self._model.top_k)
        logits_HRV = heads(self._hidden_ND[sources])[: len(self._model.top_k)]
        best_RHK = logits_HRV.topk(widest, -1).indices.transpose(0, 1).flatten(1)
        nodes = range(1, 1 + tree.num_candidates)
        columns = [(tree.depths[node] - 1) * widest + tree.ranks[node] for node in nodes]
        proposals: Tensor = best_RHK[:, torch.tensor(columns, device=self._device)]
        given = [index for index, row in enumerate(self.rows) if row.source is None]
        if given and self._model.tokens is not None:
            # Never accepted: a thread's samples must not depend on other threads.
            proposals[given] = self._model.tokens.child_id
        return proposals

    def _prefill(self, prompt: list[int]) -> Tensor:
        size = len(prompt)
        starts = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        self.cache.begin_pass(starts, 1, size, size)
        mask = torch.ones((1, 1, size, size), dtype=torch.bool, device=self._device).tril()
        positions = torch.arange(size, device=self._device)[None]
        ids = torch.tensor([prompt], device=self._device)
        return self._call(ids, mask, positions, logits_to_keep=1)

    def _forward(self, tokens_RQ: Tensor, key: tuple[bool, bool]) -> Tensor:
        num_rows, num_nodes = tokens_RQ.shape
        longest = max(row.length for row in self.rows) + num_nodes
        starts_R1 = torch.tensor([[row.length] for row in self.rows], device=self._device)
        self.cache.begin_pass(starts_R1, num_rows, num_nodes, longest)
        slots_T = torch.arange(longest, device=self._device)
        # 0: prefix, 1 ... Q: nodes, Q + 1: slots that this row does not use yet.
        kinds_RT = (slots_T - starts_R1 + 1).clamp_(0, num_nodes + 1)
        mask_R1QT = self._visible[key][:, kinds_RT].transpose(0, 1)[:, None]
        positions_RQ = starts_R1 + self._offsets[key]
        return self._call(tokens_RQ, mask_R1QT, positions_RQ, logits_to_keep=0)

    def _call(self, ids: Tensor, mask: Tensor, positions: Tensor, logits_to_keep: int) -> Tensor:
        model, hook = self._model.model, None
        if self._model.heads is not None:
            hook = model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)
        try:
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        finally:
            if hook is not None:
                hook.remove()
        logits: Tensor = output.logits
        return logits

    def _keep_hidden(self, _module: Any, inputs: tuple[Tensor, ...]) -> None:
        self._hidden_ND = inputs[0].flatten(0, 1)

    def _ban(self, logits_RQV: Tensor, tokens_RQ: Tensor) -> None:
        tokens = self._model.tokens
        if tokens is None:
            return
        logits_RQV[..., tokens.child_id] = -torch.inf
        if self._model.forks:
            after_control = (tokens_RQ == tokens.fork_id) | (tokens_RQ == tokens.child_id)
            logits_RQV[..., tokens.fork_id].masked_fill_(after_control, -torch.inf)
        else:
            logits_RQV[..., tokens.fork_id] = -torch.inf

    def _uniforms(self, tree: CandidateTree) -> list[list[float]] | None:
        """Return a random number for each token that a thread may gain; None if none is needed."""
        if self._choice.temperature == 0 or self._choice.tokens_of_thread is not None:
            return None
        uniforms = []
        for row in self.rows:
            numbers = [row.thread.uniform(depth) for depth in tree.depths]
            if row.child is not None:
                numbers[-1] = row.child.uniform(0)
            uniforms.append(numbers)
        return uniforms

    def _hand_out(self, tree: CandidateTree, chosen: ChosenTokens) -> None:
        """Give each thread its tokens, then add forked rows and remove finished ones."""
        opened: list[Row] = []
        num_nodes = len(tree.parents)
        for index, row in enumerate(list(self.rows)):
            child, row.child = row.child, None
            waiting, row.waiting = row.waiting, None
            start = row.length
            self._accept(index, row, tree, chosen, opened)
            if waiting is not None and not self._family.closed:
                self._saved[waiting] = self.cache.save_row(index, start + 1)
            if child is not None:
                target = len(self.rows) + len(opened)
                self.cache.copy_row(index, target, start + 1)
                self.cache.copy_slot((index, start + num_nodes - 1), (target, start + 1))
                opened.append(Row(child, start + 2, 0))
                child_node = num_nodes - 1
                if child.alive:
                    token = chosen.next_token(index, child_node, tree, child)
                    self._give(opened[-1], token, index * num_nodes + child_node)
        self.rows += opened
        if self._family.closed:
            self.rows.clear()
            self._saved.clear()
            return
        self._drop_ended()
        self._start_waiting()

    def _accept(
        self, index: int, row: Row, tree: CandidateTree, chosen: ChosenTokens, opened: list[Row]
    ) -> None:
        """Follow the tree while a candidate is the thread's next token."""
        start, path, node, forked = row.length, [0], 0, None
        while row.thread.alive:
            token = chosen.next_token(index, node, tree, row.thread)
            forked = self._give(row, token, index * len(tree.parents) + node)
            follower = next(
                (n for n in tree.children[node] if chosen.given[index][n] == token), None
            )
            if follower is None or not (row.thread.alive or forked):
                break
            path.append(follower)
            node = follower
            if forked is not None:
                self._open_computed(index, row, start, path, forked, opened)
                forked = None
        row.length = start + len(path)
        if path != list(range(len(path))):
            self.cache.keep_slots(index, start, [start + n for n in path])

    def _give(self, row: Row, token: int, source: int) -> Thread | None:
        """Append a token to the row's thread, to be computed next; return the child it opens."""
        row.pending, row.source = token, source
        forked = self._family.add_token(row.thread, token)
        row.child = row.waiting = None
        if forked is not None:
            if forked.alive:
                row.child = forked
            else:
                row.waiting = forked
        return forked

    def _open_computed(
        self, index: int, row: Row, start: int, path: list[int], child: Thread, opened: list[Row]
    ) -> None:
        """Open a child whose fork token was a candidate and is already in the cache."""
        row.child = row.waiting = None
        assert self._model.tokens is not None
        # The copy of a waiting child is also assembled beyond the rows in use.
        target, length = len(self.rows) + len(opened), start + len(path)
        self.cache.copy_row(index, target, start)
        for depth, node in enumerate(path):
            self.cache.copy_slot((index, start + node), (target, start + depth))
        if child.alive:
            opened.append(Row(child, length, self._model.tokens.child_id))
        else:
            self._saved[child] = self.cache.save_row(target, length)

    def _drop_ended(self) -> None:
        """Replace each finished row by the last one."""
        index = 0
        while index < len(self.rows):
            if self.rows[index].carries:
                index += 1
                continue
            last = self.rows.pop()
            if index < len(self.rows):
                self.cache.copy_row(len(self.rows), index, last.length)
                self.rows[index] = last

    def _start_waiting(self) -> None:
        assert self._model.tokens is not None or not self._family.waiting
        while self._family.waiting and self._family.waiting[0] in self._saved:
            thread = self._family.start_waiting()
            if thread is None or self._model.tokens is None:
                return
            saved = self._saved.pop(thread)
            self.cache.load_row(len(self.rows), saved)
            self.rows.append(Row(thread, saved[0].shape[0], self._model.tokens.child_id))
