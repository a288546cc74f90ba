"""Count how many details of an answer grow at once: `python docs/details_at_once.py`.

Asks the embedded model about the 48 topics of its corpus that have tips, at temperature 0 in
bfloat16. Counts the threads besides the main one that generate a token in the same step. Prints,
for each kind of question, how many answers reach which number.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from apar_core.offline.data.tiny_corpus.content import load_topics
from apar_core.tree.block_statistics import thread_steps
from apar_core.tree.thread_names import ROOT_THREAD, ThreadId
from cluster.cli.generate import start_engine
from deployments.config.model import DEFAULT_MODEL

Item = TypeVar("Item")

NUM_TOGETHER = 16
"""So few that no thread waits for a place in a step."""

Stretches = Sequence[tuple[int, int]]
"""First and last step of each stretch in which a thread generates."""

QUESTIONS = {
    "Give me N tips for TOPIC. (N = 3 to 8)": [
        f"Give me {number} tips for {{}}." for number in range(3, 9)
    ],
    "Give me 5 tips for TOPIC.": ["Give me 5 tips for {}."],
    "Give me 5 tips for TOPIC as bullet points.": ["Give me 5 tips for {} as bullet points."],
    "Tell me about TOPIC.": ["Tell me about {}."],
    "Give me a detailed guide to TOPIC.": ["Give me a detailed guide to {}."],
}
SHOWN = (
    "Give me 5 tips for learning guitar.",
    "Give me a detailed guide to learning guitar.",
    "Give me a detailed guide to baking bread.",
)


def most_at_once(threads: Iterable[Stretches]) -> int:
    """Return the most threads that generate in one step."""
    at = Counter(
        step for thread in threads for first, last in thread for step in range(first, last + 1)
    )
    return max(at.values(), default=0)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Split into lists of at most `size` (itertools has this from Python 3.12 on)."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def main() -> None:
    """Print the counts, and the steps of each thread of a few answers."""
    engine = start_engine(DEFAULT_MODEL)
    sampling = {"max_tokens": 900, "temperature": 0.0, "extra_args": {"apar_enabled": True}}

    def ask(questions: Sequence[str]) -> list[Mapping[ThreadId, Stretches]]:
        prompts = [engine.chat_prompt(question) for question in questions]
        answers = [
            answer
            for batch in batched(prompts, NUM_TOGETHER)
            for answer in engine.generate(batch, sampling)
        ]
        return [thread_steps(answer.record.trees[0]) if answer.record else {} for answer in answers]

    topics = [topic for topic in load_topics() if topic.item == "tip"]
    for kind, forms in QUESTIONS.items():
        asked = [form.format(topic.name) for form in forms for topic in topics]
        counts = Counter(
            most_at_once(steps for thread, steps in threads.items() if thread != ROOT_THREAD)
            for threads in ask(asked)
        )
        line = ", ".join(f"{number}: {counts[number]}" for number in sorted(counts))
        sys.stdout.write(f"{kind:<46}{line}\n")
    for question, threads in zip(SHOWN, ask(SHOWN), strict=True):
        details = [steps for thread, steps in threads.items() if thread != ROOT_THREAD]
        stretches = [threads[ROOT_THREAD], *details]
        text = ", ".join("+".join(f"{a}-{b}" for a, b in steps) for steps in stretches)
        most = most_at_once(details)
        sys.stdout.write(f"\n{question} {most} at once. Steps, the main thread first:\n  {text}\n")
    engine.shutdown()


if __name__ == "__main__":
    main()
