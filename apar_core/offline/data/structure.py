"""An answer as the tree that the paper's rules make of it (APAR, arXiv 2401.06761, appendix B).

Where the paper leaves a choice: an answer of one paragraph has nothing to write in parallel and is
unstructured; every list of an answer counts; the number of a point ("1.") is no sentence, nor is
"Sure!"; a line that leads to a list below it is a root; dates, "24/7" and odds like 1/6 are no
mathematics. The thought of a reasoning model is no part of the answer that is structured: it stays
at the start of the root thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from apar_core.offline.data.ambiguity import ambiguity
from apar_core.offline.data.detail_spans import tree_of_details
from apar_core.offline.data.ordered_lists import ordered_list_details
from apar_core.offline.data.paragraphs import paragraph_details
from apar_core.offline.data.records import ParagraphRecord
from apar_core.offline.data.thoughts import split_thought
from apar_core.offline.data.unordered import unordered_details

AnswerKind = Literal["ordered_list", "paragraphs", "unordered_list", "unstructured"]
KINDS: tuple[AnswerKind, ...] = ("ordered_list", "paragraphs", "unordered_list", "unstructured")


class StructureRules(BaseModel):
    """Which rules apply; the paper's own by default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unordered_lists: bool = Field(
        False, description="Fork at bullet points and headings too, which the paper does not."
    )


class ExtractedAnswer(NamedTuple):
    """The tree of an answer; `flat_text(tree)` is the answer. `reason`: why it has no forks."""

    kind: AnswerKind
    tree: ParagraphRecord
    reason: str | None


_PAPER_RULES = StructureRules()


def extract_tree(answer: str, rules: StructureRules = _PAPER_RULES) -> ExtractedAnswer:
    """Return the answer as an ordered list, else as paragraphs, else as one thread.

    A thought before the answer is kept verbatim at the start of the first paragraph.
    """
    thought, rest = split_thought(answer)
    extracted = _extract_answer(rest, rules)
    if not thought:
        return extracted
    tree = replace(extracted.tree, text=thought + extracted.tree.text)
    return extracted._replace(tree=tree)


def _extract_answer(answer: str, rules: StructureRules) -> ExtractedAnswer:
    reason = ambiguity(answer)
    if reason is not None:
        return ExtractedAnswer("unstructured", ParagraphRecord(answer), reason)
    details = ordered_list_details(answer)
    if details is not None:
        return ExtractedAnswer("ordered_list", tree_of_details(answer, details), None)
    if rules.unordered_lists:
        details = unordered_details(answer)
        if details is not None:
            return ExtractedAnswer("unordered_list", tree_of_details(answer, details), None)
    details = paragraph_details(answer)
    if details is not None:
        return ExtractedAnswer("paragraphs", tree_of_details(answer, details), None)
    return ExtractedAnswer("unstructured", ParagraphRecord(answer), "no structure")
