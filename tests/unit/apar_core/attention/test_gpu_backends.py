"""The GPU backends on a CPU: all but the device's attention function, which torch replaces."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import block_table as v1_tables
from vllm.v1.worker.gpu import block_table as v2_tables

from apar_core import vllm_names
from apar_core.attention import families as grouping
from apar_core.attention import gpu_backends, plan, triton_kernel
from apar_core.attention.families import Families, partition
from apar_core.attention.gpu_backends import (
    FamilyFlashBackend,
    FamilyFlashBuilder,
    FamilyFlashImpl,
    FamilyFlashMetadata,
    FamilyTritonBackend,
    FamilyTritonBuilder,
    FamilyTritonImpl,
    FamilyTritonMetadata,
)
from apar_core.attention.plan import StepPlanner
from apar_core.vllm_names import host_block_table, watch_block_tables
from tests.fakes.flash_attention import flash_attn_varlen_func, plain_attention
from tests.fakes.scripted_engine import write_model_config

BLOCK_SIZE, NUM_BLOCKS = 16, 24
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 32
SCALE = HEAD_SIZE**-0.5
# Tokens of each row with this step's, and this step's alone: two families, a lone row, a prefill
# chunk and a row with drafts that begin with the blocks of the first family.
TABLES = [
    [1, 2, 3, 4],
    [1, 2, 5],
    [6, 7, 8],
    [1, 2, 9],
    [6, 7, 10],
    [11, 12],
    [1, 2, 13, 14],
    [1, 2, 15],
]
SEQ_LENS = [61, 33, 40, 48, 34, 20, 60, 40]
QUERY_LENS = [1, 1, 1, 1, 1, 1, 25, 3]
FAMILIES = {(0, 1, 3): 2, (2, 4): 2}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "_compiled", lambda: partition)
    monkeypatch.setattr(gpu_backends, "flash_attention", lambda: flash_attn_varlen_func)


def configuration(model_dir: Path) -> VllmConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False
    )
    model = ModelConfig(
        model=str(model_dir), skip_tokenizer_init=True, dtype="float32", max_model_len=64
    )
    return VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        additional_config={"apar": {"family": {"min_prefix_blocks": 1}}},
    )


def common_metadata() -> CommonAttentionMetadata:
    width = max(map(len, TABLES))
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in TABLES], dtype=torch.int32)
    starts = torch.tensor([0, *np.cumsum(QUERY_LENS)], dtype=torch.int32)
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=len(TABLES),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
        block_table_tensor=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
    )


def kv_cache_spec() -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.float32,
    )


def flash_builder(model_dir: Path) -> FamilyFlashBuilder:
    config = configuration(model_dir)
    with set_current_vllm_config(config):
        return FamilyFlashBuilder(kv_cache_spec(), [], config, torch.device("cpu"))


def test_two_passes_of_flash_attention_equal_one(model_dir: Path) -> None:
    torch.manual_seed(0)
    builder, common = flash_builder(model_dir), common_metadata()
    num_tokens = common.num_actual_tokens
    kv_cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    # The model pads its tokens for piecewise CUDA graphs.
    query = torch.randn(num_tokens + 5, NUM_HEADS, HEAD_SIZE)
    output = torch.full_like(query, 7.0)
    attention = FamilyFlashImpl(
        NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS, None, None, kv_cache_dtype="auto"
    )
    attention.vllm_flash_attn_version = 2

    metadata = builder.build(0, common)
    attention.forward(torch.nn.Module(), query, query, query, kv_cache, metadata, output)

    assert isinstance(metadata, FamilyFlashMetadata)
    assert metadata.plan is not None
    starts = metadata.plan.families.starts.tolist()
    rows = metadata.plan.families.rows.tolist()
    assert {
        tuple(rows[first:end]): blocks
        for first, end, blocks in zip(
            starts, starts[1:], metadata.plan.families.prefix_blocks.tolist(), strict=False
        )
    } == FAMILIES
    keys, values = kv_cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    expected, _ = flash_attn_varlen_func(
        query[:num_tokens], keys, values, max(QUERY_LENS), common.query_start_loc,
        max(SEQ_LENS), seqused_k=common.seq_lens, softmax_scale=SCALE, causal=True,
        block_table=common.block_table_tensor, return_softmax_lse=True, fa_version=2,
    )  # fmt: skip
    torch.testing.assert_close(output[:num_tokens], expected, rtol=1e-5, atol=1e-6)
    assert (output[num_tokens:] == 7.0).all()
    assert builder.planner.counts.saved_blocks == 2 * 2 + 2
    assert builder.planner.counts.shared_rows == 5


def test_drafts_and_steps_without_families_get_vllms_metadata(model_dir: Path) -> None:
    builder, common = flash_builder(model_dir), common_metadata()

    assert not isinstance(builder.build(0, common, fast_build=True), FamilyFlashMetadata)
    assert not isinstance(builder.build(0, common.replace(causal=False)), FamilyFlashMetadata)
    alone = common.replace(block_table_tensor=torch.arange(32, dtype=torch.int32).view(8, 4) + 1)
    assert not isinstance(builder.build(0, alone), FamilyFlashMetadata)


def test_the_metadata_of_another_group_has_no_families(model_dir: Path) -> None:
    builder, common = flash_builder(model_dir), common_metadata()
    metadata = builder.build(0, common)

    other = builder.update_block_table(metadata, common.block_table_tensor + 1, common.slot_mapping)

    assert isinstance(other, FamilyFlashMetadata)
    assert other.plan is None


def test_our_triton_kernel_gets_the_families_of_decoding_steps(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run what is around the kernel; the kernel itself has its own tests."""
    torch.manual_seed(0)
    num_rows = 5
    common = common_metadata()
    common = common.replace(
        query_start_loc=common.query_start_loc[: num_rows + 1],
        query_start_loc_cpu=common.query_start_loc_cpu[: num_rows + 1],
        seq_lens=common.seq_lens[:num_rows],
        num_reqs=num_rows,
        num_actual_tokens=num_rows,
        max_query_len=1,
        block_table_tensor=common.block_table_tensor[:num_rows],
    )
    config = configuration(model_dir)
    # Their constructors ask the GPU.
    builder_type: Any = FamilyTritonBuilder
    builder = builder_type.__new__(builder_type)
    builder.kv_cache_spec = kv_cache_spec()
    builder.planner = StepPlanner(config, [], builder.kv_cache_spec, None)
    for name in ("seq_threshold_3D", "num_par_softmax_segments", "max_seqs_64_segments"):
        setattr(builder, name, 0)
    for name in ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum", "rswa_window"):
        setattr(builder, name, None)
    kv_cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    query = torch.randn(num_rows + 3, NUM_HEADS, HEAD_SIZE)
    output = torch.full_like(query, 7.0)
    attention_type: Any = FamilyTritonImpl
    attention = attention_type.__new__(attention_type)
    attention.head_size, attention.scale = HEAD_SIZE, SCALE
    given: list[Families] = []

    def family_decode(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, seq_lens: Tensor,
        families: Families, scale: float, *, max_seq_len: int, max_family_rows: int,
        max_prefix_blocks: int, output: Tensor,
    ) -> Tensor:  # fmt: skip
        assert max_seq_len >= int(seq_lens.max())
        assert max_family_rows == int(families.starts.diff().max())
        assert max_prefix_blocks == int(families.prefix_blocks.max())
        given.append(families)
        for row, length in enumerate(seq_lens.tolist()):
            blocks = table[row].long()
            attended, _ = plain_attention(
                query[row, None], keys[blocks].flatten(0, 1)[:length],
                values[blocks].flatten(0, 1)[:length], scale, causal=False,
            )  # fmt: skip
            output[row] = attended[0]
        return output

    monkeypatch.setattr(triton_kernel, "family_decode", family_decode)
    metadata = builder.build(0, common)
    attention.forward(torch.nn.Module(), query, query, query, kv_cache, metadata, output)

    assert given[0].row_prefix_blocks.tolist() == [2, 2, 2, 2, 2]
    assert (output[num_rows:] == 7.0).all()
    keys, values = kv_cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    expected, _ = flash_attn_varlen_func(
        query[:num_rows], keys, values, 1, common.query_start_loc, max(SEQ_LENS),
        seqused_k=common.seq_lens, softmax_scale=SCALE, causal=True,
        block_table=common.block_table_tensor, return_softmax_lse=True, fa_version=2,
    )  # fmt: skip
    torch.testing.assert_close(output[:num_rows], expected)
    # Steps with prefill are vLLM's.
    assert not isinstance(builder.build(0, common_metadata()), FamilyTritonMetadata)


@pytest.mark.parametrize("backend", [FamilyFlashBackend, FamilyTritonBackend])
def test_attention_stays_out_of_full_cuda_graphs(backend: Any, model_dir: Path) -> None:
    builder = backend.get_builder_cls()

    support = builder.get_cudagraph_support(configuration(model_dir), None)

    assert support is AttentionCGSupport.NEVER


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize(
    ("asked", "resolved"),
    [
        ("FULL_AND_PIECEWISE", "PIECEWISE"),
        ("FULL_DECODE_ONLY", "PIECEWISE"),
        ("PIECEWISE", "PIECEWISE"),
        ("NONE", "NONE"),
        ("FULL", None),
    ],
)
def test_vllm_captures_no_attention_of_ours_in_any_mode(
    asked: str, resolved: str | None, is_v2: bool
) -> None:
    """A graph that replays a step's tables would read another step's families."""
    config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode[asked]
    )
    config.set_splitting_ops_for_v1("naive")

    def resolve() -> CUDAGraphMode:
        return config.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.NEVER, "FamilyFlashBackend", use_v2_model_runner=is_v2
        )

    if resolved is None:
        with pytest.raises(ValueError, match="FULL is not supported with FamilyFlashBackend"):
            resolve()
    else:
        assert resolve() is CUDAGraphMode[resolved]
        assert not config.cudagraph_mode.has_full_cudagraphs()


@pytest.mark.parametrize("backend", [FamilyFlashBackend, FamilyTritonBackend])
def test_full_cuda_graphs_stay_if_no_layer_fits(
    backend: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def support(*sinks: Any) -> Any:
        monkeypatch.setattr(gpu_backends, "get_layers_from_vllm_config", lambda *_: layers(*sinks))
        return backend.get_builder_cls().get_cudagraph_support(configuration(model_dir), None)

    def layers(*sinks: Any) -> dict[str, Any]:
        given = {
            "attn_type": "decoder", "sliding_window": None, "alibi_slopes": None,
            "logits_soft_cap": 0, "kv_cache_dtype": "auto",
        }  # fmt: skip
        return {
            str(number): SimpleNamespace(
                impl=SimpleNamespace(**given, sinks=each), get_attn_backend=lambda: backend
            )
            for number, each in enumerate(sinks)
        }

    assert support([0.0], [0.0]) is not AttentionCGSupport.NEVER
    assert support([0.0], None) is AttentionCGSupport.NEVER


def test_each_kind_of_layer_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def attend(**arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments["causal"])
        return flash_attn_varlen_func(**arguments)

    def layer(backend: Any, num_heads: int, size: int = 1, **changes: Any) -> Any:
        impl = FamilyFlashImpl(num_heads, HEAD_SIZE, SCALE, NUM_KV_HEADS, None, None, "auto")
        impl.vllm_flash_attn_version = 2
        vars(impl).update(changes)
        kv_cache = torch.zeros(size, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
        return SimpleNamespace(impl=impl, kv_cache=kv_cache, get_attn_backend=lambda: backend)

    ours, theirs = FamilyFlashBackend, FamilyFlashBackend.__base__
    layers = {
        "first": layer(ours, 4), "second": layer(ours, 4), "wider": layer(ours, 8),
        "of another backend": layer(theirs, 2), "does not fit": layer(ours, 6, sinks=[0.0]),
        "without a cache": layer(ours, 10, 0),
        "on ROCm": layer(ours, 12, vllm_flash_attn_version=None),
    }  # fmt: skip
    monkeypatch.setattr(gpu_backends, "flash_attention", lambda: attend)
    monkeypatch.setattr(gpu_backends, "get_layers_from_vllm_config", lambda *_: layers)

    config: Any = None
    gpu_backends.warm_up(config)

    assert calls == [False, True, False, True]


def test_a_worker_tells_which_of_its_layers_read_families(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = vars(flash_attention_impl())
    layers = {
        name: SimpleNamespace(impl=SimpleNamespace(**fits | {"sinks": sinks}))
        for name, sinks in (("a", None), ("b", None), ("c", [0.0]), ("d", None), ("e", None))
    }

    def some(_: Any, __: Any, names: list[str] | None = None) -> dict[str, Any]:
        return {name: layers[name] for name in (layers if names is None else names)}

    monkeypatch.setattr(plan, "get_layers_from_vllm_config", some)
    config = configuration(model_dir)
    # Two KV cache groups of ours, of which one has sinks in a layer, and one of another backend.
    planners = [StepPlanner(config, names, kv_cache_spec(), None) for names in (["a", "b"], ["c"])]
    builders = [*(SimpleNamespace(planner=each) for each in planners), SimpleNamespace()]
    groups = [[SimpleNamespace(metadata_builders=[each])] for each in builders]
    runner = SimpleNamespace(attn_groups=groups)
    worker: Any = SimpleNamespace(vllm_config=config, model_runner=runner)

    assert plan.family_layers(worker) == (2, 5)
    # A table on the GPU that was not watched: the layers fall back in a step.
    unknown: Any = SimpleNamespace(
        block_table_tensor=on_gpu(torch.zeros(1), 8).block_table_tensor, causal=True,
        mm_req_doc_ranges=None, num_reqs=8, seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
    )  # fmt: skip
    assert planners[0].plan(unknown) is None
    assert plan.family_layers(worker) == (0, 5)


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that are built meanwhile, freed ones included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in before:
                self.num_bytes += each.untyped_storage().nbytes()
        return result


def sized(rows: int, tokens: int, max_model_len: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return a configuration with these limits."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=rows, max_num_batched_tokens=tokens),
        model_config=SimpleNamespace(max_model_len=max_model_len, dtype=dtype),
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE),
    )


def flash_attention_impl(version: int | None = 2) -> FamilyFlashImpl:
    impl = FamilyFlashImpl(
        NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS, None, None, kv_cache_dtype="auto"
    )
    impl.vllm_flash_attn_version = version
    return impl


def test_the_largest_step_of_two_passes_allocates_no_more_than_is_reserved(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are as many and as long as the limits allow, and each is in a family of two."""
    rows, blocks = 8, 4
    tables = [
        [1 + row // 2 * 4, 2 + row // 2 * 4, 3 + row // 2 * 4, 30 + row] for row in range(rows)
    ]
    starts = torch.arange(rows + 1, dtype=torch.int32)
    lens = torch.full((rows,), blocks * BLOCK_SIZE, dtype=torch.int32)
    common = common_metadata().replace(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=rows,
        num_actual_tokens=rows, max_query_len=1, max_seq_len=blocks * BLOCK_SIZE,
        block_table_tensor=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip
    builder, impl = flash_builder(model_dir), flash_attention_impl()
    step = builder.planner.plan(common)
    assert step is not None
    assert step.families.num_families == rows // 2
    kv_cache = torch.zeros(40, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    query = torch.zeros(rows, NUM_HEADS, HEAD_SIZE)
    limits = sized(rows, rows, blocks * BLOCK_SIZE)

    def attend(*, q: Tensor, out: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor]:
        # What FlashAttention returns; its own memory is not counted.
        return torch.empty_like(q) if out is None else out, torch.empty(q.shape[1], len(q))

    def merge(*_: Tensor) -> None:
        pass

    monkeypatch.setattr(gpu_backends, "flash_attention", lambda: attend)
    monkeypatch.setattr(gpu_backends, "merge_attn_states", merge)
    with Allocated() as tables_of_step:
        on_device = gpu_backends.on_device(step, common.block_table_tensor, lens, BLOCK_SIZE)
    with Allocated() as of_layer:
        impl._attend_twice(query, kv_cache, on_device, starts, 1, torch.empty_like(query))

    output_bytes = query.nbytes
    assert of_layer.num_bytes - output_bytes == impl.step_bytes(limits)
    layer = SimpleNamespace(impl=impl, get_attn_backend=lambda: FamilyFlashBackend)
    monkeypatch.setattr(gpu_backends, "get_layers_from_vllm_config", lambda *_: {"a": layer})
    for_tables = gpu_backends.step_bytes(limits) - impl.step_bytes(limits)
    held = sum(each.nbytes for each in (on_device.prefix_table, on_device.suffix_table))
    # A suffix has one block here, but the reservation is for one that is a row's whole length.
    assert held <= for_tables
    assert tables_of_step.num_bytes >= held


def test_flash_attention_3_also_gets_room_for_the_splits_of_its_prefix_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_backends, "num_processors", lambda: 132)
    limits = sized(256, 8192, 4096, torch.bfloat16)

    splits = 132 // NUM_KV_HEADS
    extra = flash_attention_impl(3).step_bytes(limits) - flash_attention_impl().step_bytes(limits)

    # Float32 outputs, and a sum for each.
    assert extra == splits * 256 * NUM_HEADS * 4 * (HEAD_SIZE + 1)


def test_the_kv_cache_is_sized_while_a_steps_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = sized(256, 8192, 4096, torch.bfloat16)
    impl_type: Any = FamilyTritonImpl
    impl = impl_type.__new__(impl_type)
    fits = {
        "attn_type": "decoder", "sliding_window": None, "alibi_slopes": None, "logits_soft_cap": 0,
        "sinks": None, "kv_cache_dtype": "auto", "num_heads": 32, "head_size": 128,
    }  # fmt: skip
    vars(impl).update(fits)
    backends: list[Any] = [FamilyTritonBackend]
    layer = SimpleNamespace(impl=impl, get_attn_backend=lambda: backends[0])
    monkeypatch.setattr(gpu_backends, "get_layers_from_vllm_config", lambda *_: {"a": layer})
    taken = Allocated()

    def determine_available_memory(self: Any) -> int:
        return 2**40 - taken.num_bytes

    monkeypatch.setattr(vllm_names.Worker, "determine_available_memory", determine_available_memory)
    worker: Any = gpu_backends.FamilyGPUWorker.__new__(gpu_backends.FamilyGPUWorker)
    worker.vllm_config, worker.device = limits, torch.device("meta")
    with taken:
        assert worker.determine_available_memory() == 2**40 - gpu_backends.step_bytes(limits)
        # 257 places, of 14 bytes a row.
        assert gpu_backends.step_bytes(limits) == 256 * 2**20 + 256 * 257 * 14
        # Layers of another backend, and those that are read row by row, need nothing.
        backends[0] = FamilyTritonBackend.__base__
        assert gpu_backends.step_bytes(limits) == 0
        backends[0], impl.sinks = FamilyTritonBackend, [0.0]
        assert gpu_backends.step_bytes(limits) == 0


class GPUTable(SimpleNamespace):
    """A block table that says that it is on a GPU; its memory is here."""

    device = SimpleNamespace(type="cuda")


def on_gpu(table: Tensor, num_rows: int, slots: list[int] | None = None) -> Any:
    pretended = GPUTable(data_ptr=table.data_ptr)
    req_idx = None if slots is None else np.array(slots)
    return SimpleNamespace(block_table_tensor=pretended, num_reqs=num_rows, req_idx=req_idx)


@pytest.fixture
def watchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what needs a GPU in the classes of block tables; both are restored afterwards."""

    def init_v1(self: Any, block_size: int) -> None:
        memory = torch.zeros(4, 5, dtype=torch.int32)
        self.block_size = block_size
        self.block_table = SimpleNamespace(gpu=torch.zeros(4, 5), np=memory.numpy())

    def init_v2(self: Any, block_size: int) -> None:
        self.block_sizes = [block_size]
        self.input_block_tables = [torch.zeros(4, 5, dtype=torch.int32)]
        self.num_blocks = SimpleNamespace(np=np.zeros((1, 4), np.int32))

    def append(self: Any, row: int, block_ids: tuple[list[int], ...], overwrite: bool) -> None:
        self.num_blocks.np[0, row] *= not overwrite
        self.num_blocks.np[0, row] += len(block_ids[0])

    monkeypatch.setattr(v1_tables.BlockTable, "__init__", init_v1)
    monkeypatch.setattr(v2_tables.BlockTables, "__init__", init_v2)
    monkeypatch.setattr(v2_tables.BlockTables, "append_block_ids", append)
    monkeypatch.setattr(v1_tables.BlockTable, vllm_names._WATCHED, True, raising=False)
    monkeypatch.delattr(v1_tables.BlockTable, vllm_names._WATCHED)


@pytest.fixture
def watched(watchable: None) -> None:
    watch_block_tables()


@pytest.mark.usefixtures("watchable")
def test_tables_that_the_v1_runner_builds_before_the_model_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table_type: Any = v1_tables.BlockTable

    def init_device(self: Any) -> None:
        # The runner's constructor does this; later it only replaces tables of another size.
        self.table = table_type(BLOCK_SIZE)

    monkeypatch.setattr(vllm_names.Worker, "init_device", init_device)
    worker: Any = gpu_backends.FamilyGPUWorker.__new__(gpu_backends.FamilyGPUWorker)
    worker.init_device()

    assert host_block_table(on_gpu(worker.table.block_table.gpu, 1), BLOCK_SIZE, 1) is not None


@pytest.mark.usefixtures("watched")
def test_the_v2_runners_writes_are_known_on_the_host() -> None:
    tables: Any = v2_tables.BlockTables
    tables = tables(BLOCK_SIZE)
    tables.append_block_ids(2, ([5, 6],), overwrite=True)
    tables.append_block_ids(2, ([7],), overwrite=False)
    tables.append_block_ids(0, ([8, 9],), overwrite=True)
    # A preempted request returns in the same place with other blocks.
    tables.append_block_ids(0, ([3],), overwrite=True)
    step = on_gpu(tables.input_block_tables[0], 2, [2, 0])

    found = host_block_table(step, BLOCK_SIZE, 3)

    # Copied as far as the step needs them: a table is as wide as the longest possible row.
    assert found is not None
    assert found.flags.c_contiguous
    assert found.shape == (2, 3)
    assert found[0].tolist() == [5, 6, 7]
    assert found[1, :1].tolist() == [3]
    assert host_block_table(step, 2 * BLOCK_SIZE, 3) is None
    assert host_block_table(on_gpu(tables.input_block_tables[0], 2), BLOCK_SIZE, 3) is None


@pytest.mark.usefixtures("watched")
def test_the_v1_runners_table_is_on_the_host_already() -> None:
    table: Any = v1_tables.BlockTable
    table = table(BLOCK_SIZE)
    table.block_table.np[1, :2] = [3, 4]

    found = host_block_table(on_gpu(table.block_table.gpu, 3), BLOCK_SIZE, 2)

    assert found is not None
    assert found.shape == (3, 5)
    assert found[1].tolist() == [3, 4, 0, 0, 0]
    assert host_block_table(on_gpu(torch.zeros(1), 3), BLOCK_SIZE, 2) is None
