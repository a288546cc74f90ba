"""The forms of an answer about a topic, as paragraph trees."""

from __future__ import annotations

from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.data.tiny_corpus.topics import NUM_POINTS, Point, Stage, Topic

# Bulleted lists begin in the middle, so that they differ from the numbered list on the same topic.
_FIRST_BULLET = 4


def items_phrase(topic: Topic, number: int) -> str:
    """Return for example "5 tips for baking bread"."""
    return f"{number} {'tips for' if topic.item == 'tip' else 'facts about'} {topic.name}"


def _detail(point: Point) -> ParagraphRecord:
    return ParagraphRecord(" " + point.detail)


def numbered_list(topic: Topic, number: int) -> ParagraphRecord:
    """Return an introduction, `number` numbered points whose details fork, and a closing line."""
    items = [
        (f"\n{index}. **{point.title}**:", _detail(point))
        for index, point in enumerate(topic.points[:number], start=1)
    ]
    first_text, first_detail = items[0]
    items[0] = (f"Here are {items_phrase(topic, number)}:\n{first_text}", first_detail)
    return chain(items, closing=f"\n\n{topic.closing}")


def bulleted_list(topic: Topic, number: int) -> ParagraphRecord:
    """Return `number` bulleted points whose details fork, without any frame."""
    rotated = topic.points[_FIRST_BULLET:] + topic.points[:_FIRST_BULLET]
    items = [(f"\n- **{point.title}**:", _detail(point)) for point in rotated[:number]]
    items[0] = (items[0][0].lstrip("\n"), items[0][1])
    return chain(items)


def paragraphs(topic: Topic, number: int) -> ParagraphRecord:
    """Return `number` paragraphs, each forking after its first sentence."""
    items = [
        (f"\n\n{passage.sentence}", ParagraphRecord(f" {passage.rest}"))
        for passage in topic.passages[:number]
    ]
    items[0] = (items[0][0].lstrip("\n"), items[0][1])
    return chain(items)


def _stage_detail(topic: Topic, stage: Stage) -> ParagraphRecord:
    points = [topic.points[number - 1] for number in stage.points]
    items = [(f"\n   - **{point.title}**:", _detail(point)) for point in points]
    items[0] = (f" {stage.lead}{items[0][0]}", items[0][1])
    return chain(items)


def guide(topic: Topic) -> ParagraphRecord:
    """Return numbered sections that fork, each with points that fork again."""
    noun = "guide to" if topic.item == "tip" else "overview of"
    items = [
        (f"\n{index}. **{stage.title}**:", _stage_detail(topic, stage))
        for index, stage in enumerate(topic.stages, start=1)
    ]
    opening = f"Here is {'a' if topic.item == 'tip' else 'an'} {noun} {topic.name}:\n"
    items[0] = (opening + items[0][0], items[0][1])
    return chain(items)


def titles_only(topic: Topic, number: int) -> ParagraphRecord:
    """Return a numbered list of bare titles: too short to be worth a fork."""
    titles = [f"{index}. {point.title}" for index, point in enumerate(topic.points, start=1)]
    return ParagraphRecord("\n".join(titles[: min(number, NUM_POINTS)]))
