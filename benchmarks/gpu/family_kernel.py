"""GPU check of the kernel that reads shared KV blocks once: see `check.py`.

Needs torch and triton only. On a GPU it compares the kernel with a float64 reference, then times
recorded steps (`family_steps.py`) with families, without them, and with torch's own attention. On a
CPU the same runs in Triton's interpreter, where times mean nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from apar_core.attention.families import Families, no_families, partition
from benchmarks.gpu.family_steps import BLOCK_SIZE, SHAPES, Shape, Step, read_steps
from benchmarks.gpu.torch_checks import CheckError, Found, Setup, run

if TYPE_CHECKING:
    from apar_core.attention.triton_kernel import Tiles

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest error of a head's output, as a vector, relative to the reference's length. At 16 bits it
is twice the rounding of one number: weights, values and output are rounded, sums are not."""
SAVING_TARGET, SLOWER_TARGET = 0.8, 1.03
"""Least share of the ideal saving; largest time where nothing is shared, over that without."""
# Steps with fewer rows do not fill a GPU, so no target is set for them.
_LEAST_ROWS = 64
# The step whose blocks are made unshared: large, and its memory fits into a small GPU.
_UNSHARED_STEP = "7B, 0.3"
# No further step is measured after this share of the check's time.
_TIME_SHARE = 0.85
# Of `FamilySettings`.
_MIN_ROWS, _MIN_PREFIX_BLOCKS = 2, 4


@dataclass(frozen=True)
class Problem:
    """Arguments of `family_decode`. The families and the table may be wrong; see `planted`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    families: Families | None
    scale: float

    def solve(self, tiles: Tiles | None = None, output: Tensor | None = None) -> Tensor:
        """Return what the kernel computes: [R, H, D]."""
        from apar_core.attention.triton_kernel import family_decode

        return family_decode(
            self.query, self.keys, self.values, self.table, self.lengths, self.families,
            self.scale, output=output, tiles=tiles, **self.bounds,
        )  # fmt: skip

    @property
    def bounds(self) -> dict[str, int]:
        """Return the limits that a caller knows on the host; this waits for the device."""
        found = {"max_seq_len": int(self.lengths.max())}
        if self.families is not None and self.families.num_families:
            found["max_family_rows"] = int(self.families.starts.diff().max())
            found["max_prefix_blocks"] = int(self.families.prefix_blocks.max())
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with random numbers.

    rows: of the largest family, beside which there are others and `single_rows` of none.
    prefix: its tokens, cut to full blocks. sharpness: factor of the queries; a large one makes
        single tokens decide, so that maxima of prefix and suffix differ.
    chunk: tokens of a chunk; None: as the kernel chooses.
    is_packed: keys and values beside each other by head and token, as vLLM has them.
    """

    dtype: torch.dtype = torch.float32
    block_size: int = 16
    heads: int = 8
    ratio: int = 1
    head_size: int = 64
    rows: int = 3
    prefix: int = 48
    single_rows: int = 1
    sharpness: float = 1.0
    chunk: int | None = None
    is_packed: bool = True

    def tiles(self) -> Tiles | None:
        """Return the tiles that split into chunks, or None."""
        from apar_core.attention.triton_kernel import default_tiles

        if self.chunk is None:
            return None
        tiles = default_tiles(self.dtype, self.head_size)
        return replace(tiles, smallest_chunk=self.chunk, largest_chunk=self.chunk)


def make_problem(case: Case, device: str, seed: int) -> Problem:
    """Return a random problem. What no row may read is NaN: other blocks, tokens after rows."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    size = case.block_size
    full = case.prefix // size
    # The family in question, one of two rows, and one of a single row.
    prefixes = {case.rows: full} if case.rows < 3 else {case.rows: full, 2: full // 2, 1: 1}
    members = [number for number in prefixes for _ in range(number)] + [0] * case.single_rows
    shared = [prefixes.get(number, 0) for number in members]
    order = torch.randperm(len(members), generator=random).tolist()
    members, shared = [members[place] for place in order], [shared[place] for place in order]
    # On a boundary of blocks, one after it, none, or any.
    rests = [(0, size, 1, size + 1, draw(1, 4 * size))[draw(0, 4)] for _ in members]
    # For the planted errors, a row of the first family with blocks after its prefix.
    rests[members.index(case.rows)] = 4 * size + 1
    lengths = [number * size + rest for number, rest in zip(shared, rests, strict=True)]
    counts = [-(-length // size) for length in lengths]
    own = sum(counts) + 1
    free = iter((torch.randperm(own, generator=random) + 1).tolist())
    common = {number: [next(free) for _ in range(count)] for number, count in prefixes.items()}
    table = torch.zeros((len(members), max(*counts, 1) + 1), dtype=torch.int32)
    for row, (number, count) in enumerate(zip(members, counts, strict=True)):
        blocks = common.get(number, []) if shared[row] else []
        blocks = blocks + [next(free) for _ in range(count - len(blocks))]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
    kv_heads = case.heads // case.ratio
    content = torch.randn((own + 1, size, kv_heads, 2 * case.head_size), generator=random)
    is_read = torch.zeros((own + 1, size), dtype=torch.bool)
    for row, length in enumerate(lengths):
        for number in range(counts[row]):
            is_read[table[row, number], : max(0, min(size, length - number * size))] = True
    content[~is_read] = float("nan")
    content = content.to(case.dtype)
    keys, values = content.split(case.head_size, dim=-1)
    if not case.is_packed:
        keys, values = keys.contiguous(), values.contiguous()
    query = torch.randn((len(members), case.heads, case.head_size), generator=random)
    rows = [[row for row, other in enumerate(members) if other == number] for number in prefixes]
    families = Families(
        rows=_ints([row for family in rows for row in family]),
        starts=_ints([sum(map(len, rows[:index])) for index in range(len(rows) + 1)]),
        prefix_blocks=_ints(list(prefixes.values())),
        row_prefix_blocks=_ints(shared),
    )
    problem = Problem(
        (case.sharpness * query).to(case.dtype), keys, values, table, _ints(lengths), families,
        case.head_size**-0.5,
    )  # fmt: skip
    return _moved(problem, device)


def _ints(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _moved(problem: Problem, device: str) -> Problem:
    tensors = ("query", "keys", "values", "table", "lengths")
    moved: dict[str, Any] = {name: getattr(problem, name).to(device) for name in tensors}
    if problem.families is not None:
        moved["families"] = moved_families(problem.families, device)
    return replace(problem, **moved)


def moved_families(families: Families, device: str) -> Families:
    """Return families on a device."""
    return Families(**{name: value.to(device) for name, value in vars(families).items()})


def reference(problem: Problem) -> Tensor:
    """Return the attention in float64, row by row, without families: [R, H, D]."""
    num_rows, heads, head_size = problem.query.shape
    block_size, kv_heads = problem.keys.shape[1:3]
    found = torch.zeros((num_rows, heads, head_size), dtype=torch.float64)
    for row, length in enumerate(problem.lengths.tolist()):
        blocks = problem.table[row, : -(-length // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].double()
            for cache in (problem.keys, problem.values)
        )
        query = problem.query[row].double().view(kv_heads, -1, head_size)
        scores = problem.scale * torch.einsum("kgd,nkd->kgn", query, keys)
        weighted = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), values)
        found[row] = weighted.reshape(heads, head_size).cpu()
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error of a head's output relative to its length; inf for NaN."""
    difference = (found.double().cpu() - expected).norm(dim=-1)
    # A row without tokens gives zeros, and has to.
    length = expected.norm(dim=-1)
    errors = torch.where(length > 0, difference / length.clamp_min(1e-300), difference)
    return float(errors.nan_to_num(nan=float("inf")).max())


def error_of(case: Case, device: str, seed: int = 0) -> float:
    """Return the kernel's relative error in a case; unwritten outputs are NaN."""
    problem = make_problem(case, device, seed)
    output = torch.full_like(problem.query, float("nan"))
    return relative_error(problem.solve(case.tiles(), output), reference(problem))


def pairwise(**choices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield combinations in which any two values of any two fields meet at least once."""
    names = list(choices)
    left = {
        (one, a, other, b)
        for index, one in enumerate(names)
        for other in names[index + 1 :]
        for a in range(len(choices[one]))
        for b in range(len(choices[other]))
    }
    while left:
        # One pair that is missing, then the value of each field that meets most missing pairs.
        one, a, other, b = min(left)
        chosen = {one: a, other: b}
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    range(len(choices[name])),
                    key=lambda value, name=name: sum(  # type: ignore[misc]
                        (name, value, known, chosen[known]) in left
                        or (known, chosen[known], name, value) in left
                        for known in chosen
                    ),
                )
        met = {
            (first, chosen[first], second, chosen[second])
            for index, first in enumerate(names)
            for second in names[index + 1 :]
        }
        left -= met
        yield {name: choices[name][chosen[name]] for name in names}


def cases(*, is_short: bool = False) -> list[Case]:
    """Return cases that cover all pairs of the values which the kernel supports.

    is_short: of fewer values, since a GPU compiles the kernels for each case.
    """
    values: dict[str, Sequence[Any]] = {
        "dtype": tuple(TOLERANCE), "block_size": (16, 32), "head_size": (64, 128),
        # Heads, and heads per KV head.
        "shape": ((8, 8), (8, 1), (64, 1), (32, 4), (24, 3), (28, 7), (40, 5), (36, 6), (32, 2)),
        "rows": (1, 2, 5, 17, 32), "prefix": (0, 16, 160, 992, 4096), "single_rows": (0, 3),
        "sharpness": (1.0, 6.0), "chunk": (None, 64, 512), "is_packed": (True, False),
    }  # fmt: skip
    if is_short:
        values |= {
            "shape": ((64, 8), (32, 1), (28, 7)), "rows": (2, 7, 32), "prefix": (160, 0, 4096),
        }  # fmt: skip
    return [
        Case(heads=heads, ratio=ratio, **fields)
        for fields in pairwise(**values)
        for heads, ratio in [fields.pop("shape")]
    ]


def has_room_for_errors(case: Case) -> bool:
    """Return whether a case is one for `unnoticed`: not sharp, nor so long that one block fades."""
    return case.sharpness == 1 and case.rows > 1 and 2 * case.block_size <= case.prefix <= 200


def planted(problem: Problem) -> dict[str, Problem]:
    """Return the same problem with errors that a comparison has to notice.

    For a problem of `make_problem` with two rows or more and two blocks or more in the first
    family, and without sharpness, which hides errors in tokens that have no weight.
    """
    families = problem.families
    assert families is not None
    members = families.rows[: int(families.starts[1])].tolist()
    longest = max(members, key=lambda row: int(problem.lengths[row]))
    depth, size = int(families.prefix_blocks[0]), problem.keys.shape[1]
    length = int(problem.lengths[longest])

    def changed(name: str, index: int, value: int) -> Problem:
        tensor = getattr(families, name).clone()
        tensor[index] = value
        return replace(problem, families=replace(families, **{name: tensor}))

    def with_block(row: int, column: int, block: Tensor) -> Problem:
        table = problem.table.clone()
        table[row, column] = block
        return replace(problem, table=table)

    lengths = problem.lengths.clone()
    lengths[longest] -= size
    place = members.index(longest)
    other = members[place - 1]
    return {
        "wrong block in the prefix": with_block(members[0], 1, problem.table[members[0], 0]),
        "wrong block in a suffix": with_block(
            longest, (length - 1) // size, problem.table[longest, 0]
        ),
        "prefix one block short": changed("prefix_blocks", 0, depth - 1),
        "suffix one block late": changed("row_prefix_blocks", longest, depth + 1),
        "row left out of its family": changed("rows", place, other),
        "last block left out": replace(problem, lengths=lengths),
        "scale": replace(problem, scale=1.1 * problem.scale),
    }


def unnoticed(case: Case, device: str, seed: int = 0) -> list[str]:
    """Return the planted errors whose results the comparison would accept."""
    problem = make_problem(case, device, seed)
    random = torch.Generator().manual_seed(seed)
    found = []
    for name, wrong in planted(problem).items():
        # Other queries each time: memory may still hold the right partial results of the last.
        query = torch.randn(problem.query.shape, generator=random).to(problem.query)
        expected = reference(replace(problem, query=query))
        output = torch.full_like(query, float("nan"))
        error = relative_error(replace(wrong, query=query).solve(case.tiles(), output), expected)
        if error <= TOLERANCE[case.dtype]:
            found.append(name)
    return found


def families_of(table: Tensor, lengths: Tensor) -> Families:
    """Return the families of a step by the default settings, as `group_rows` without numba."""
    full = ((lengths - 1) // BLOCK_SIZE).numpy()
    found = partition(table.numpy(), full, _MIN_ROWS, _MIN_PREFIX_BLOCKS)
    return Families(*(torch.from_numpy(each) for each in found))


@dataclass(frozen=True, slots=True)
class Reads:
    """Tokens of KV cache that a step reads: by row, with families, and each block once."""

    by_row: int
    with_families: int
    distinct: int

    @property
    def ideal_saving(self) -> float:
        """Share of the time that families save if time is proportional to the tokens read."""
        return 1 - self.with_families / self.by_row


def reads_of(step: Step, families: Families) -> Reads:
    """Count what a step reads."""
    by_row = int(step.lengths.sum())
    distinct = 0
    seen: set[int] = set()
    for row, length in enumerate(step.lengths.tolist()):
        for number, block in enumerate(step.table[row, : -(-length // BLOCK_SIZE)].tolist()):
            if block not in seen:
                seen.add(block)
                distinct += min(BLOCK_SIZE, length - number * BLOCK_SIZE)
    return Reads(by_row, by_row - BLOCK_SIZE * families.num_saved_blocks, distinct)


def unshared(step: Step) -> Step:
    """Return the step with blocks of its own for each row."""
    table = step.table.copy()
    used = table >= 0
    table[used] = range(int(used.sum()))
    return replace(step, name=f"{step.name}, nothing shared", table=table)


def barely_shared(step: Step) -> Step:
    """Return the step with one family: two rows and the fewest blocks that make one."""
    alone = unshared(step)
    longest = alone.lengths.argsort()[-2:]
    alone.table[longest[1], :_MIN_PREFIX_BLOCKS] = alone.table[longest[0], :_MIN_PREFIX_BLOCKS]
    return replace(alone, name=f"{step.name}, least family")


def num_layers(layer_bytes: int, setup: Setup) -> int:
    """Return how many layers' KV caches no cache of the GPU holds: four times the largest known."""
    return min(max(-(-(1 << 28) // layer_bytes), 2), 64) if setup.has_gpu else 1


def layers_of(step: Step, shape: Shape, setup: Setup, dtype: torch.dtype) -> list[Problem]:
    """Return the problems of several layers, so that no layer finds its KV cache in a cache."""
    table = torch.from_numpy(step.table).clamp_min(0).to(setup.device)
    lengths = torch.from_numpy(step.lengths).to(setup.device)
    blocks = int(step.table.max()) + 1
    layer_bytes = 2 * blocks * BLOCK_SIZE * shape.kv_heads * shape.head_size * dtype.itemsize
    problems = []
    for _ in range(num_layers(layer_bytes, setup)):
        cache = torch.randn(
            (blocks, BLOCK_SIZE, shape.kv_heads, 2 * shape.head_size), device=setup.device,
            dtype=dtype,
        )  # fmt: skip
        query = torch.randn(
            (len(lengths), shape.heads, shape.head_size), device=setup.device, dtype=dtype
        )
        keys, values = cache.split(shape.head_size, dim=-1)
        problems.append(Problem(query, keys, values, table, lengths, None, shape.head_size**-0.5))
    return problems


def with_families(layers: Sequence[Problem], families: Families | None) -> list[Problem]:
    """Return the layers with families that are on the host."""
    if families is None:
        return list(layers)
    moved = moved_families(families, str(layers[0].query.device))
    return [replace(layer, families=moved) for layer in layers]


def solving(
    layers: Sequence[Problem], tiles: Tiles | None, outputs: Sequence[Tensor] | None = None
) -> Callable[[], None]:
    """Return a function that launches the kernels of all layers, and reads nothing back."""
    from apar_core.attention.triton_kernel import family_decode

    bounds = layers[0].bounds
    written = outputs or [torch.empty_like(layer.query) for layer in layers]

    def solve() -> None:
        for layer, output in zip(layers, written, strict=True):
            family_decode(
                layer.query, layer.keys, layer.values, layer.table, layer.lengths, layer.families,
                layer.scale, output=output, tiles=tiles, **bounds,
            )  # fmt: skip

    return solve


def torch_attention(layers: Sequence[Problem]) -> Callable[[], None]:
    """Return a function that runs torch's own attention on dense keys and values.

    Rows of similar length are padded to the longest of 16. Gathering is not part of the function.
    Only the first layer, for memory; the heads of a KV head stand as queries beside each other.
    """
    [layer] = layers[:1]
    kv_heads, head_size = layer.keys.shape[2:]
    batches = []
    for rows in layer.lengths.argsort().split(16):
        longest = int(layer.lengths[rows].max())
        blocks = layer.table[rows, : -(-longest // BLOCK_SIZE)].long()
        keys, values = (
            cache[blocks].flatten(1, 2)[:, :longest].transpose(1, 2).contiguous()
            for cache in (layer.keys, layer.values)
        )
        positions = torch.arange(longest, device=layer.query.device)
        mask = (positions < layer.lengths[rows, None])[:, None, None]
        query = layer.query[rows].view(len(rows), kv_heads, -1, head_size)
        batches.append((query, keys, values, mask))

    def attend() -> None:
        for query, keys, values, mask in batches:
            functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=layer.scale
            )

    return attend


def seconds_of(function: Callable[[], None], setup: Setup, repeats: int = 20) -> float:
    """Return the median seconds of a function, on a GPU as a CUDA graph."""
    if not setup.has_gpu:
        begin_s = time.perf_counter()
        function()
        return time.perf_counter() - begin_s
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for number in range(2 + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(float(begin.elapsed_time(end)) / 1000)
    return statistics.median(times)


def host_seconds(function: Callable[[], None], setup: Setup) -> float:
    """Return the seconds that the host takes to launch a function without a CUDA graph."""
    if not setup.has_gpu:
        return 0.0
    function()
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin_s)
    torch.cuda.synchronize()
    return statistics.median(times)


def candidates(setup: Setup) -> list[Tiles]:
    """Return the tiles to choose from."""
    from apar_core.attention.triton_kernel import Tiles

    if not setup.has_gpu:
        return [Tiles(tokens=16)]
    return [Tiles(), Tiles(stages=2), Tiles(tokens=32), Tiles(tokens=128, stages=2)]


def measure(step: Step, shape: Shape, setup: Setup, dtype: torch.dtype) -> Found:
    """Time a step without and with families, by tiles, and torch's attention; seconds a layer."""
    families = families_of(torch.from_numpy(step.table), torch.from_numpy(step.lengths))
    reads = reads_of(step, families)
    layers = layers_of(step, shape, setup, dtype)
    grouped = with_families(layers, families)
    timed: list[Found] = []
    for tiles in candidates(setup):
        # Tiles that do not fit into a GPU's shared memory are no candidates there.
        try:
            timed.append({
                "tiles": asdict(tiles),
                "plain_s": seconds_of(solving(layers, tiles), setup) / len(layers),
                "family_s": seconds_of(solving(grouped, tiles), setup) / len(layers),
            })  # fmt: skip
        except RuntimeError as error:
            if "OutOfResources" not in type(error).__name__:
                raise
    plain_s = min(each["plain_s"] for each in timed)
    family_s = min(each["family_s"] for each in timed)
    token_bytes = 2 * shape.kv_heads * shape.head_size * dtype.itemsize
    found: Found = {
        "step": step.name, "model": step.model, "rows": len(step.lengths),
        "families": families.num_families, "rows_in_families": families.num_rows,
        "tokens": asdict(reads), "plain_bytes": token_bytes * reads.by_row,
        "family_bytes": token_bytes * reads.with_families, "ideal_saving": reads.ideal_saving,
        "plain_s": plain_s, "family_s": family_s, "saving": 1 - family_s / plain_s,
        "torch_s": seconds_of(torch_attention(layers), setup), "tiles": timed,
        "launch_s": host_seconds(solving(grouped, None), setup) / len(layers),
    }  # fmt: skip
    if reads.ideal_saving > 0:
        found["share_of_ideal"] = found["saving"] / reads.ideal_saving
    return found


def nothing_shared(step: Step, shape: Shape, setup: Setup, dtype: torch.dtype) -> Found:
    """Time steps in which no row, or the fewest rows and blocks, share anything."""
    layers = layers_of(unshared(step), shape, setup, dtype)
    plain_s = seconds_of(solving(layers, None), setup)
    empty = no_families(len(step.lengths))
    empty_s = seconds_of(solving(with_families(layers, empty), None), setup)
    least = barely_shared(step)
    families = families_of(torch.from_numpy(least.table), torch.from_numpy(least.lengths))
    alone_s = seconds_of(solving(layers_of(least, shape, setup, dtype), None), setup)
    layers = with_families(layers_of(least, shape, setup, dtype), families)
    least_s = seconds_of(solving(layers, None), setup)
    return {
        "step": step.name, "no_families": empty_s / plain_s, "least_family": least_s / alone_s,
        "unshared_s": plain_s / len(layers),
    }  # fmt: skip


def step_costs_of(measured: Sequence[Found]) -> list[Found]:
    """Return the measured costs of attention as fields of `StepCosts`, by model.

    Least squares over the steps of a model: the time without families is a constant, which stands
    for launches, and `attended_token_s` for each token. With families, a saved token saves that,
    and the pass over them costs `group_pass_s`, and `grouped_row_s` for each of its rows.
    """
    found = []
    for model in dict.fromkeys(each["model"] for each in measured):
        steps = [each for each in measured if each["model"] == model]

        def numbers(function: Callable[[Found], float], steps: list[Found] = steps) -> Tensor:
            return torch.tensor([function(each) for each in steps], dtype=torch.float64)

        layers = SHAPES[model].layers
        tokens = numbers(lambda each: each["tokens"]["by_row"])
        saved = tokens - numbers(lambda each: each["tokens"]["with_families"])
        plain = layers * numbers(lambda each: each["plain_s"])
        family = layers * numbers(lambda each: each["family_s"])
        token_s, constant_s = _fitted(plain, tokens)
        row_s, pass_s = _fitted(
            family - plain + token_s * saved, numbers(lambda each: each["rows_in_families"])
        )
        found.append({
            "model": model, "steps": len(steps), "attended_token_s": token_s,
            "constant_s": constant_s, "group_pass_s": pass_s, "grouped_row_s": row_s,
        })  # fmt: skip
    return found


def _fitted(seconds: Tensor, numbers: Tensor) -> tuple[float, float]:
    """Return slope and constant; with fewer than three points, a slope through the origin."""
    if len(numbers) < 3:
        return float(seconds.sum() / numbers.sum()), 0.0
    columns = torch.stack([numbers, torch.ones_like(numbers)], 1)
    slope, constant = torch.linalg.lstsq(columns, seconds[:, None]).solution[:, 0].tolist()
    return slope, constant


def family_attention(setup: Setup) -> Found:
    """Compare with the reference, then time the recorded steps; see the module's docstring."""
    begin_s = time.perf_counter()
    if setup.is_tiny:
        checked = [Case(dtype=dtype, heads=4, ratio=2, chunk=32) for dtype in TOLERANCE]
    else:
        checked = cases(is_short=setup.has_gpu)
    errors: dict[torch.dtype, float] = dict.fromkeys(TOLERANCE, 0.0)
    wrong = []
    for seed, case in enumerate(checked):
        if has_room_for_errors(case):
            names = unnoticed(case, setup.device, seed)
            wrong += [f"not noticed: {name} in {case}" for name in names]
        error = error_of(case, setup.device, seed)
        errors[case.dtype] = max(error, errors[case.dtype])
        if not error <= TOLERANCE[case.dtype]:
            wrong.append(f"error {error:.1e} in {case}")
    shown = ", ".join(
        f"{str(dtype).removeprefix('torch.')} {error:.1e} (at most {TOLERANCE[dtype]:.0e})"
        for dtype, error in errors.items()
    )
    found: Found = {
        "cases": len(checked), "checked_s": time.perf_counter() - begin_s,
        "errors": {str(dtype): error for dtype, error in errors.items()},
        "summary": [f"{len(checked)} cases against float64, largest error: {shown}"],
    }  # fmt: skip
    if wrong:
        raise CheckError("; ".join(wrong[:5]))
    steps = read_steps()
    dtype, shapes = torch.bfloat16, SHAPES
    if setup.is_tiny:
        dtype = torch.float32
        steps = [_first_rows(each) for each in steps if each.model == "llama-7b"][:2]
        shapes = {"llama-7b": Shape(2, 1, 64, 2)}
    found["nothing_shared"] = shared = [
        nothing_shared(each, shapes[each.model], setup, dtype)
        for each in steps
        if each.name == _UNSHARED_STEP
    ]
    found["steps"] = measured = []
    for step in steps:
        # The last ones have least value.
        if time.perf_counter() - begin_s > _TIME_SHARE * setup.limit_s:
            found["summary"].append(f"{step.name}: not measured, for want of time")
            continue
        measured.append(measure(step, shapes[step.model], setup, dtype))
    found["step_costs"] = step_costs_of(measured)
    for each in measured:
        line = f"{each['step']}: {each['rows']} rows, {each['families']} families"
        if not setup.has_gpu:
            found["summary"].append(f"{line}; times of the interpreter mean nothing")
            continue
        rate = 1e-12 * each["plain_bytes"] / each["plain_s"]
        plain, family, dense, launch = (
            f"{1e6 * each[name]:.0f}" for name in ("plain_s", "family_s", "torch_s", "launch_s")
        )
        line += (
            f"; us a layer: {plain} without families ({rate:.2f} TB/s), {family} with, {dense} in "
            f"torch's attention, {launch} on the host without a CUDA graph"
        )
        if "share_of_ideal" in each:
            line += f"; saves {each['saving']:.0%} of ideally {each['ideal_saving']:.0%}"
        found["summary"].append(line)
    found["targets"] = targets = {
        f"at least {SAVING_TARGET:.0%} of the ideal saving": [
            f"{each['step']} {each['share_of_ideal']:.0%}"
            for each in measured
            if each["rows"] >= _LEAST_ROWS and each.get("share_of_ideal", 1) < SAVING_TARGET
        ],
        f"at most {SLOWER_TARGET - 1:.0%} slower where nothing is shared": [
            f"{each['step']} {each[name]:.3f}"
            for each in shared
            for name in ("no_families", "least_family")
            if each[name] > SLOWER_TARGET
        ],
    }
    for name, missed in targets.items():
        state = "met" if not missed else f"missed by {', '.join(missed)}"
        found["summary"].append(
            f"target: {name}: {state if setup.has_gpu else 'not measured without a GPU'}"
        )
    return found


def _first_rows(step: Step) -> Step:
    """Return a few rows of a step, for the interpreter."""
    families = families_of(torch.from_numpy(step.table), torch.from_numpy(step.lengths))
    rows = families.rows[:3].tolist()
    rows += [row for row in range(len(step.lengths)) if row not in rows][:1]
    return replace(step, table=step.table[rows], lengths=step.lengths[rows])


def use_interpreter() -> None:
    """Run Triton kernels on the CPU; call it before triton is imported for the first time."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton 3.6 converts arrays of one element, which numpy 2.5 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired


if __name__ == "__main__":
    if "cpu" in sys.argv:
        use_interpreter()
    run((family_attention,))
