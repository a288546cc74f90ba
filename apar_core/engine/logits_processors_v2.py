"""Bans of control tokens and replay for vLLM's V2 model runner, its default on GPUs.

They do what those of `logits_processors.py` do for the V1 runner. V2 has another interface: a
request keeps a slot, the host may run ahead of the device, and the sampled tokens are on the device
alone. So the bans look at the token that was just fed to each row, and need no history. A replay
needs only positions, which the host knows.

Source of the interface: `vllm/v1/worker/gpu/sample/logits_processor/interface.py` (vLLM 0.32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from apar_core.engine.logits_processors import CERTAIN_LOGIT
from apar_core.engine.replay import script_of
from apar_core.fork_parameters import ForkParameters
from apar_core.vllm_names import V2LogitsProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

    from apar_core.vllm_names import LogitsContext, LogitsProcRequestState

# What a slot's request may sample: anything; no control token; forks, but not after a control
# token.
_FREE, _UNFORKED, _FORKING = 0, 1, 2


class ForkBans(V2LogitsProcessor):
    """Bans the sampling of control tokens, as the V1 processor of the same name.

    With speculative decoding, each draft token has a row of its own, which is checked as well.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._kinds = torch.zeros(
            req_states.max_num_reqs, dtype=torch.int64, device=req_states.device
        )
        self._prompt_len = req_states.prompt_len
        # Slots whose threads have begun a tool call, and slots of children.
        self._call = torch.zeros_like(self._kinds, dtype=torch.bool)
        self._child = torch.zeros_like(self._call)
        self._staged: dict[int, tuple[int, bool]] = {}
        # All requests belong to one checkpoint, so they share their control tokens.
        self._parameters: ForkParameters | None = None

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Set what the request in a slot may sample; return whether anything is banned."""
        parameters = ForkParameters.from_extra_args(sampling_params.extra_args)
        if parameters is None or parameters.blocks is not None:
            self._staged[req_idx] = _FREE, False
            return False
        self._parameters = parameters
        kind = _FORKING if parameters.may_fork else _UNFORKED
        self._staged[req_idx] = kind, bool(parameters.thread_path)
        return True

    def apply_staged_writes(self) -> None:
        """Copy the new requests' bans to the device, in one transfer."""
        if self._staged:
            kinds, children = zip(*self._staged.values(), strict=True)
            written = _on_device([[*self._staged], [*kinds], [*children]], self._kinds.device)
            self._kinds[written[0]] = written[1]
            self._child[written[0]] = written[2].bool()
            self._call[written[0]] = False
            self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Set banned logits [num_rows, vocabulary] to minus infinity, in place.

        Copies nothing between host and device.
        """
        if self._parameters is None:
            return logits
        fork_id, banned_ids = self._parameters.fork_id, self._parameters.banned_ids
        slots = ctx.expanded_idx_mapping
        kinds = self._kinds[slots]
        # The first token of a child follows its seed, that of a resumed thread perhaps a fork
        # token.
        follows_control = ctx.input_ids == fork_id
        for banned_id in banned_ids:
            follows_control = follows_control | (ctx.input_ids == banned_id)
        bans_fork = (kinds == _UNFORKED) | ((kinds == _FORKING) & follows_control)
        if self._parameters.call_ids:
            # Engines that speculate have no such tokens, so each slot has one row.
            calls, is_child = self._call[slots], self._child[slots]
            generated = ctx.pos >= self._prompt_len.gpu[slots]
            for call_id in self._parameters.call_ids:
                calls = calls | (generated & (ctx.input_ids == call_id))
                logits[:, call_id].masked_fill_(is_child, -torch.inf)
            self._call[slots] = calls
            bans_fork = bans_fork | calls
        for banned_id in banned_ids:
            logits[:, banned_id].masked_fill_(kinds != _FREE, -torch.inf)
        logits[:, fork_id].masked_fill_(bans_fork, -torch.inf)
        return logits


class Replay(V2LogitsProcessor):
    """Makes each replayed thread generate its tokens, as the V1 processor of the same name.

    vLLM's own trace replay (`trace_decode_token_ids`) gives the tokens of one sequence, not those
    of the threads that it will fork.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._device = req_states.device
        self._prompt_tokens = req_states.prompt_len
        self._scripts: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Keep the tokens of the thread in a slot; return whether it has any."""
        script = script_of(sampling_params.extra_args)
        if script is None:
            self._scripts.pop(req_idx, None)
            return False
        self._scripts[req_idx] = script
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Raise one logit of each replayed row of [num_rows, vocabulary], in place."""
        rows: list[int] = []
        chosen: list[int] = []
        # A request has one row, and the bound is its exact length, because a replay excludes
        # speculative decoding. A CUDA graph may pad the lengths.
        lengths = ctx.seq_lens_upper_bound_np.tolist()
        slots = ctx.idx_mapping_np.tolist()
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=False)):
            script = self._scripts.get(slot, ())
            position = length - int(self._prompt_tokens.np[slot])
            # Negative in a part of a prompt, whose sample is discarded.
            if 0 <= position < len(script):
                rows.append(row)
                chosen.append(script[position])
        if rows:
            indices = _on_device([rows, chosen], self._device)
            logits[indices[0], indices[1]] = CERTAIN_LOGIT
        return logits


def _on_device(values: list[list[int]], device: torch.device) -> torch.Tensor:
    """Copy numbers without waiting for the device."""
    on_host = torch.tensor(values, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
