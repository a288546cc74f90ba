"""Formats of parallel text that this package knows, and those that it refuses.

Each description names the source, and says what could not be verified there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from apar_core.formats.parallel_format import Join, ListItems, Outlines, ParallelFormat
from apar_core.formats.sub_searches import CALL, END_CALL

APAR = ParallelFormat(
    name="apar",
    description="APAR (arXiv 2401.06761), section 2.2. Spelling of this project's checkpoints.",
    trigger="[Fork]",
    child_seed="[Child]",
    parent="continues",
    children_fork=True,
    tokens=("[Fork]", "[Child]"),
)

APAR_RELEASED = APAR.model_copy(
    update={
        "name": "apar-released",
        "description": "The checkpoints THUDM/apar-7b and THUDM/apar-13b. Their training text "
        "lacks line breaks before details and paragraphs, which `separators` restores.",
        "trigger": "[SplitMask]",
        "child_seed": "[SplitSop]",
        "tokens": ("[SplitMask]", "[SplitSop]"),
    }
)

HPD_PARSING = ParallelFormat(
    name="hpd-parsing",
    description="PaddlePaddle/HPD-Parsing (arXiv 2607.18839). Read in GreatV/oar-ocr, an "
    "independent engine (oar-ocr-vl/src/models/hpd_parsing/model.rs): a child is cut before "
    "<FORK>, starts with <CHILD>, and cannot fork. Not verified: its own server (vLLM pull request "
    "48715).",
    trigger="<FORK>",
    child_seed="<CHILD>",
    cut="before",
    parent="continues",
    replacement="<CHILD>",
    tokens=("<FORK>", "<CHILD>"),
    reserved=("<BLOCK>",),
)

PADOC = ParallelFormat(
    name="padoc",
    description="Longin-Yu/PaDoc (arXiv 2608.06146), from its README: a main sequence "
    "`layout [fork] layout [fork] ...`, and a branch at each [fork]. Not verified, as its code is "
    "not public here: what its client puts after [fork] to tell a branch from the main sequence "
    "(`child_seed`, here empty), and what the joined result looks like (`replacement`).",
    trigger="[fork]",
    parent="continues",
    replacement="[fork]",
)

THREADWEAVER = ParallelFormat(
    name="threadweaver",
    description="facebookresearch/threadweaver, branching_generate in "
    "threadweaver_sft/src/simple_eval.py. Its training client "
    "(threadweaver_rl/verl/experimental/agent_loop/single_turn_agent_loop.py) may continue with "
    "'\\n<Conclusion>\\n' instead (`join.suffix`). A repeated number counts once, as there.",
    trigger="</Outlines>",
    child_seed="\n<Thread>\n{number}:",
    parent="waits",
    outlines=Outlines(
        pattern=r"<Outline>\s*(?P<number>[0-9]+(?:\.[0-9]+)*)\s*:", after="<Outlines>"
    ),
    child_end=("</Thread>",),
    join=Join(
        first_header="\n<Thread>\n{number}:",
        header="<Thread>\n{number}:",
        close="</Thread>",
        unclosed="stop",
        suffix="\n",
    ),
    tokens=(
        "<Parallel>",
        "</Parallel>",
        "<Outlines>",
        "</Outlines>",
        "<Outline>",
        "</Outline>",
        "<Thread>",
        "</Thread>",
    ),
    reserved=("<Think>", "</Think>", "<Conclusion>", "</Conclusion>"),
)

PARALLEL_R1 = ParallelFormat(
    name="parallel-r1",
    description="zhengkid/Parallel-R1, verl/verl/parallel_thinking_generation_v3/"
    "parallel_thinking_loop_v3.py, with the two paths of its training scripts. Its client samples "
    "paths at temperature 1, limits their length, and closes a summary that ends the answer. "
    "For its loss it also computes positions that both paths share; what generates knows none.",
    trigger="<Parallel>",
    child_seed="<Path>",
    parent="waits",
    outlines=Outlines(count=2),
    child_end=("</Path>",),
    join=Join(header="<Path>", close="</Path>", suffix="</Parallel>\n<Summary>"),
    tokens=("<Parallel>", "</Parallel>", "<Path>", "</Path>", "<Summary>", "</Summary>"),
)

APR = ParallelFormat(
    name="apr",
    description="Adaptive Parallel Reasoning (arXiv 2504.15466), repository "
    "Parallel-Reasoning/APR, tinyrl/rollout/apr_utils.py. Its markers are ordinary text. Not "
    "reproduced: the budget that its client may repeat before a child's message, and its "
    "correction of a parent that writes <Sub Searches> itself.",
    trigger=END_CALL,
    child_seed="{message}",
    cut="nothing",
    parent="waits",
    outlines=Outlines(messages="sub-searches"),
    join=Join(
        prefix="<Sub Searches>\n",
        header="<Goal Reached in Sub Search {number} at level 1 at Node {node}>\n{result}\n",
        without_result="<No Solution in Sub Search {number} at level 1 at Node {node}>\n",
        suffix="<End Sub Searches>\n",
        replaces=CALL,
    ),
)

LISTS = ParallelFormat(
    name="lists",
    description="This project's own: ordinary lists of any instruct model fork after the heads of "
    "their items, without trained tokens (docs/lists.md).",
    parent="waits",
    items=ListItems(),
)

SHIPPED: Mapping[str, ParallelFormat] = MappingProxyType(
    {
        shipped.name: shipped
        for shipped in (
            APAR,
            APAR_RELEASED,
            HPD_PARSING,
            PADOC,
            THREADWEAVER,
            PARALLEL_R1,
            APR,
            LISTS,
        )
    }
)
"""Formats by name."""

_STITCHED = (
    "it continues after the stitched keys of its children, at the largest of their positions; "
    "vLLM computes the tokens before a thread as one sequence"
)
_SEES_OTHERS = "its workers read each other's tokens while they write; forks never do"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "multiverse": _STITCHED,
        "npr": _STITCHED,
        "aspd": "its branches share positions, which vLLM's model runner cannot give them",
        "pasta": "it reserves positions by predicted length, which vLLM's model runner cannot do",
        "hogwild": _SEES_OTHERS,
        "group-think": _SEES_OTHERS,
    }
)
"""Why a known format cannot be served, by name."""

REFUSED_TOKENS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "multiverse": ("<Parallel>", "<Goal>", "<Outline>", "<Path>", "<Conclusion>"),
        "npr": ("<guideline>", "<plan>", "<step>", "<takeaway>"),
        "aspd": ("<|para|>", "<|branch|>", "<|title|>"),
    }
)
"""Tokens by which a checkpoint of a refused format is recognised."""
