"""vLLM's CPU offloading without a GPU: its scheduler and manager, with copies by torch.

vLLM 0.32 refuses its own worker without a GPU. `OffloadingConnector` takes this one by the settings
`spec_name` and `spec_module_path`.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class TorchOffloadingSpec(CPUOffloadingSpec):
    """`CPUOffloadingSpec` with a worker that copies with torch.

    `transfer_steps` in `kv_connector_extra_config` is how many steps each transfer takes.
    """

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        steps = int(self.extra_config.get("transfer_steps", 1))
        return TorchOffloadingWorker(kv_caches, self.num_chunks, steps)


class TorchOffloadingWorker(OffloadingWorker):
    """Copies blocks when a transfer is due, so that a block that is reused too early is noticed."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int, steps: int) -> None:
        self._blocks = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        self._chunks = [
            torch.zeros((num_chunks, blocks.shape[1]), dtype=torch.int8) for blocks in self._blocks
        ]
        self._steps = steps
        self._step = 0
        # Job id: (step in which it is due, whether it stores, blocks, chunks), in order.
        self._jobs: dict[int, tuple[int, bool, Any, Any]] = {}
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = (self._step + self._steps, True, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = (self._step + self._steps, False, dst_spec, src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._step += 1
        for job_id in [job_id for job_id, job in self._jobs.items() if job[0] <= self._step]:
            self._copy(job_id)
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self._jobs.keys()):
            self._copy(job_id)

    def _copy(self, job_id: int) -> None:
        _, stores, block_spec, chunk_spec = self._jobs.pop(job_id)
        block_ids = torch.from_numpy(block_spec.block_ids).long()
        chunk_ids = torch.from_numpy(chunk_spec.block_ids).long()
        for blocks, chunks in zip(self._blocks, self._chunks, strict=True):
            if stores:
                chunks[chunk_ids] = blocks[block_ids]
            else:
                blocks[block_ids] = chunks[chunk_ids]
        self._finished.append(TransferResult(job_id, success=True))
