"""Decoding of one answer: threads are rows of a batch, and a fork copies a row.

Source: APAR (arXiv 2401.06761), algorithm 1 and appendix C.1. Each row gains one
token per pass, plus accepted candidates if there is a proposer. Rows of a pass have trees of their
own, by the predictions that they start with (PPD, arXiv 2405.18628, section 4).
Dimensions: R rows, Q nodes of a row, N = R * Q nodes of a pass, T tokens held. C nodes have a token
chosen after them. D hidden size, V vocabulary, M distances, K candidates of each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apar_core.formats.control_tokens import TreeTokens
from apar_core.offline.decoders.interface import StepRecord, TokenChoice
from apar_core.offline.decoders.proposer import Asked, Proposer, TreeStacks
from apar_core.offline.decoders.row_cache import RowCache
from apar_core.offline.decoders.thread_family import Thread, ThreadFamily
from apar_core.offline.decoders.token_chooser import (
    EXACT,
    ChosenTokens,
    TypicalAcceptance,
    choose_tokens,
)
from apar_core.offline.speculation.candidate_tree import CandidateTree, TreeStack


@dataclass(frozen=True, slots=True)
class DecodingModel:
    """Transformers model with tokens, proposer, trees and acceptance.

    `tokens` is None for a model without control tokens, `proposer` without speculation. `forks`
    tells whether fork tokens may be sampled.
    """

    model: Any
    tokens: TreeTokens | None
    forks: bool
    proposer: Proposer | None
    trees: TreeStacks
    acceptance: TypicalAcceptance


@dataclass(eq=False, slots=True)
class Row:
    """Thread in the batch, with `length` cached tokens and the `pending` token to compute next.

    `child` opens after the pending fork token in the next pass. `waiting` needs a copy of the row
    once that token is computed. The last pass predicted what follows `pending` at `state`
    distances. Its predictions begin at its node `first_read`. A child token that opens a row was
    not predicted, so its row is in state 0.
    """

    thread: Thread
    length: int
    pending: int
    child: Thread | None = None
    waiting: Thread | None = None
    state: int = 0
    first_read: int = 0

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
        self._prompt_ids = prompt
        self._saved: dict[Thread, list[Tensor]] = {}
        self._hidden_ND: Tensor | None = None
        self._num_passes = 0
        self._num_nodes = 0
        typical = choice.temperature > 0 and model.acceptance != EXACT
        if model.proposer is not None and typical:
            # Candidates decide which tokens are accepted, and a seed must decide the answer.
            model.proposer.forget()
        tokens = model.tokens
        # An id for nodes that are no tokens; it is never chosen after.
        self._child_id = tokens.child_id if tokens is not None else 0
        banned = [] if tokens is None else [tokens.child_id, *[tokens.fork_id] * (not model.forks)]
        self._banned = torch.tensor(banned, dtype=torch.int64, device=self._device)

    @torch.inference_mode()
    def step(self) -> StepRecord:
        """Run one pass and assign its tokens to threads."""
        start = time.perf_counter()
        trees, chosen = self._run_pass()
        readers = [row.thread for row in self.rows if row.thread.alive]
        readers += [row.child for row in self.rows if row.child is not None]
        cached = self._family.cached_tokens(readers)
        before = [(thread, thread.path_length) for thread in readers]
        self._hand_out(trees, chosen)
        self._num_passes += 1
        num_tokens = attended = 0
        for thread, length in before:
            gained = thread.path_length - length + thread.ended
            num_tokens += gained
            attended += gained * length + gained * (gained - 1) // 2
        seconds = time.perf_counter() - start
        return StepRecord(self._num_passes, len(readers), num_tokens, seconds, cached, attended)

    def _run_pass(self) -> tuple[list[CandidateTree], ChosenTokens]:
        stack = self._model.trees.of_rows(len(self.rows))
        self._look_up(len(stack.trees) // 2 - 1)
        numbers = [2 * row.state + (row.child is not None) for row in self.rows]
        trees = [stack.trees[number] for number in numbers]
        num_chosen = max(tree.num_chosen for tree in trees)
        self._num_nodes = max(len(tree.parents) for tree in trees)
        facts_FR = torch.tensor(
            [
                numbers,
                [row.pending for row in self.rows],
                [row.length for row in self.rows],
                [row.first_read for row in self.rows],
            ],
            device=self._device,
        )
        trees_R, pending_R, starts_R, firsts_R = facts_FR
        tokens_RQ = pending_R[:, None]
        proposer = self._model.proposer
        if self._num_nodes > 1 and proposer is None:
            tokens_RQ = stack.tokens(trees_R, self._num_nodes, tokens_RQ, self._child_id, None)
        elif self._num_nodes > 1 and proposer is not None:
            tokens_RQ = proposer.tokens(
                Asked(
                    stack, trees_R, self._num_nodes, max(tree.depth for tree in trees), tokens_RQ,
                    firsts_R, self._hidden_ND, self._banned, self._child_id,
                )
            )  # fmt: skip
        embeddings_RQ = None
        if stack.has_prompts:
            embeddings_RQ = stack.embeddings(trees_R, self._num_nodes)
        if self._prompt is not None:
            logits_RCV = self._prefill(self._prompt, stack, tokens_RQ, embeddings_RQ)
            self._prompt = None
        else:
            starts_R1 = starts_R[:, None]
            longest = max(row.length for row in self.rows) + self._num_nodes
            self.cache.begin_pass(starts_R1, len(self.rows), self._num_nodes, longest)
            mask_R1QT = stack.mask(trees_R[:, None], starts_R1, self._num_nodes, longest)
            positions_RQ = starts_R1
            if self._num_nodes > 1:
                positions_RQ = starts_R1 + stack.depths(trees_R, self._num_nodes)
            logits_RCV = self._call(tokens_RQ, embeddings_RQ, mask_R1QT, positions_RQ, num_chosen)
        tokens_RC = tokens_RQ[:, :num_chosen]
        self._ban(logits_RCV, tokens_RC)
        if proposer is not None:
            proposer.learn(tokens_RC, logits_RCV)
        return trees, choose_tokens(
            logits_RCV,
            tokens_RC,
            trees,
            self._choice,
            self._model.acceptance,
            self._uniforms(trees, num_chosen),
        )

    def _look_up(self, most: int) -> None:
        """Set the rows' states where they depend on the text; the prefill has no candidates."""
        proposer = self._model.proposer
        if proposer is None or not proposer.reads_text or self._prompt is not None:
            return
        paths = [self._path(row.thread) for row in self.rows]
        others = [thread.token_ids for thread in self._family.threads]
        for row, state in zip(self.rows, proposer.states(paths, others), strict=True):
            row.state = min(state, most)

    def _path(self, thread: Thread) -> list[int]:
        """Return the tokens that a thread reads and has written."""
        if thread.parent is None:
            return self._prompt_ids + thread.token_ids
        own_start = thread.parent.num_before + thread.num_shared
        return [*self._path(thread.parent)[:own_start], self._child_id, *thread.token_ids]

    def _prefill(
        self, prompt: list[int], stack: TreeStack, tokens_RQ: Tensor, embeddings_RQ: Tensor | None
    ) -> Tensor:
        """Compute the prompt, with the root's tree at its last token; return logits [1, 1, V]."""
        num_before, num_nodes = len(prompt) - 1, self._num_nodes
        size = num_before + num_nodes
        none_R1 = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        self.cache.begin_pass(none_R1, 1, size, size)
        mask = torch.ones((1, 1, size, size), dtype=torch.bool, device=self._device).tril()
        mask[:, :, num_before:] = stack.mask(none_R1, none_R1 + num_before, num_nodes, size)
        before = torch.tensor([prompt[:-1]], dtype=torch.int64, device=self._device)
        ids = torch.cat((before, tokens_RQ), 1)
        if embeddings_RQ is not None:
            embeddings_RQ = torch.cat((torch.zeros_like(before), embeddings_RQ), 1)
        positions = torch.arange(size, device=self._device)[None]
        if num_nodes > 1:
            positions[:, num_before:] = num_before + stack.depths(none_R1[0], num_nodes)
        return self._call(ids, embeddings_RQ, mask, positions, 1, logits_to_keep=num_nodes)

    def _call(
        self,
        ids: Tensor,
        embeddings: Tensor | None,
        mask: Tensor,
        positions: Tensor,
        num_chosen: int,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Run the model; return the logits of the first `num_chosen` of the nodes kept."""
        model, hook, inputs = self._model.model, None, {"input_ids": ids}
        if embeddings is not None:
            inputs = {"inputs_embeds": self._embedded(ids, embeddings)}
        if self._model.proposer is not None:
            # Only nodes that no thread reaches lie after the last position.
            positions = positions.clamp(max=model.config.max_position_embeddings - 1)
        if self._model.proposer is not None and self._model.proposer.reads_hidden:

            def keep_hidden(_module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                self._hidden_ND = given[0].flatten(0, 1)
                # No token is chosen after prompt tokens, whose logits are needed on one path only.
                return (given[0][:, :num_chosen],)

            hook = model.get_output_embeddings().register_forward_pre_hook(keep_hidden)
        try:
            output = model(
                **inputs,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        finally:
            if hook is not None:
                hook.remove()
        logits: Tensor = output.logits[:, :num_chosen]
        return logits

    def _embedded(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """Return the inputs [.., D] of the model: embeddings of tokens and prompt tokens."""
        assert self._model.proposer is not None
        prompts_ND = self._model.proposer.embeddings_ND
        assert prompts_ND is not None
        tokens: Tensor = self._model.model.get_input_embeddings()(ids)
        return torch.where((embeddings > 0)[..., None], prompts_ND[embeddings], tokens)

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

    def _uniforms(self, trees: list[CandidateTree], num_chosen: int) -> list[list[float]] | None:
        """Return a random number for each token that a thread may gain; None if none is needed."""
        if self._choice.temperature == 0 or self._choice.tokens_of_thread is not None:
            return None
        uniforms = []
        for row, tree in zip(self.rows, trees, strict=True):
            depths = tree.depths[: 1 + tree.num_candidates]
            numbers = [row.thread.uniform(depth) for depth in depths]
            if row.child is not None:
                numbers.append(row.child.uniform(0))
            uniforms.append(numbers + [0.0] * (num_chosen - len(numbers)))
        return uniforms

    def _hand_out(self, trees: list[CandidateTree], chosen: ChosenTokens) -> None:
        """Give each thread its tokens, then add forked rows and remove finished ones."""
        opened: list[Row] = []
        for index, (row, tree) in enumerate(zip(list(self.rows), trees, strict=True)):
            child, row.child = row.child, None
            waiting, row.waiting = row.waiting, None
            start = row.length
            self._accept(index, row, tree, chosen, opened)
            if waiting is not None and not self._family.closed:
                self._saved[waiting] = self.cache.save_row(index, start + 1)
            if child is not None:
                target = len(self.rows) + len(opened)
                self.cache.copy_row(index, target, start + 1)
                node = tree.child_node
                self.cache.copy_slot((index, start + node), (target, start + 1))
                opened.append(Row(child, start + 2, 0))
                if child.alive:
                    token = chosen.next_token(index, node, tree, child)
                    self._give(opened[-1], token, index, node, tree)
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
            forked = self._give(row, token, index, node, tree)
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

    def _give(
        self, row: Row, token: int, index: int, node: int, tree: CandidateTree
    ) -> Thread | None:
        """Append the token after a node to the row's thread; return the child it opens.

        `index` is the row of the pass that the node belongs to. The token is computed next.
        """
        row.pending = token
        if self._model.proposer is not None:
            row.state = tree.prompts[node]
            first = self._model.proposer.first_read(tree, node)
            row.first_read = index * self._num_nodes + first
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
