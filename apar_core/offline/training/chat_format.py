"""How a chat template surrounds an answer, found by rendering a short chat.

Training has to learn what serving generates: the text from the end of the prompt to the token that
ends the turn. The prompt is the template's with `add_generation_prompt` and no further arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from apar_core.errors import TrainingError
from apar_core.offline.data.records import ChatMessage, ParagraphRecord
from apar_core.offline.data.structure import (
    THOUGHT_CLOSING,
    THOUGHT_OPENING,
    is_empty_thought,
    split_thought,
)

_ANSWER = "Qxyz"
_CHAT = (ChatMessage("user", "Zyxq"),)


class ChatRefusedError(TrainingError):
    """The chat template raised an error, for example because it takes no system message."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What a template writes between its prompt and an answer.

    lead: blanks before an answer. The model generates them.
    skipped_thought: text before an answer without a thought, as an empty thought. The template
        adds it where thinking is turned off, so the model reads it and does not learn it.
    opens_thought: whether the prompt ends inside a thought.
    closes_thought: whether the prompt ends behind a thought, so that the answer has none.
    """

    lead: str = ""
    skipped_thought: str = ""
    opens_thought: bool = False
    closes_thought: bool = False

    def placed(self, answer: ParagraphRecord) -> tuple[str, ParagraphRecord]:
        """Return what follows the prompt unlearned, and the answer as the model generates it.

        An answer without a thought follows `skipped_thought`: learned behind the plain prompt, it
        would teach a reasoning model to answer without thinking. An empty thought counts as none.
        """
        thought, rest = split_thought(answer.text)
        if self.closes_thought or is_empty_thought(thought):
            return self.skipped_thought, replace(answer, text=self._led(rest))
        if self.opens_thought:
            # The prompt has the marker and the line break behind it.
            text = thought.lstrip().removeprefix(THOUGHT_OPENING).lstrip() + rest
        elif THOUGHT_OPENING not in thought:
            text = self._led(f"{THOUGHT_OPENING}\n{thought}{rest}")
        else:
            text = self._led(answer.text)
        return "", replace(answer, text=text)

    def _led(self, text: str) -> str:
        # A text with a blank of its own keeps just that one.
        return text if text[:1].isspace() else self.lead + text


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Return how the tokenizer's template surrounds an answer."""
    prompt, whole = _rendered(tokenizer)
    between = whole.removeprefix(prompt).partition(_ANSWER)[0] if whole.startswith(prompt) else ""
    opens_thought = prompt.rstrip().endswith(THOUGHT_OPENING)
    return ChatFormat(
        lead=between if between.isspace() and not opens_thought else "",
        skipped_thought=_skipped_thought(tokenizer, prompt, between, opens_thought=opens_thought),
        opens_thought=opens_thought,
        closes_thought=prompt.rstrip().endswith(THOUGHT_CLOSING),
    )


def _skipped_thought(
    tokenizer: PreTrainedTokenizerBase, prompt: str, between: str, *, opens_thought: bool
) -> str:
    # Templates that do not know the argument ignore it.
    unthinking = _render(tokenizer, _CHAT, add_generation_prompt=True, enable_thinking=False)
    added = unthinking.removeprefix(prompt)
    if unthinking.startswith(prompt) and THOUGHT_CLOSING in added:
        return added
    if between.strip():
        return between
    # Templates that open a thought in every prompt drop it from the answers of a chat.
    return f"\n{THOUGHT_CLOSING}\n\n" if opens_thought else ""


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token with which the template ends an assistant's turn.

    It can differ from `eos_token_id`, which may end a document. Without a template it is
    `eos_token_id`. Raises TrainingError if there is none.
    """
    if tokenizer.chat_template is None:
        if tokenizer.eos_token_id is None:
            raise TrainingError("the tokenizer has no end-of-sequence token to end a thread with")
        return int(tokenizer.eos_token_id)
    behind = _rendered(tokenizer)[1].rpartition(_ANSWER)[2]
    added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    added |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    ends = [text for text in added if text.strip() and behind.lstrip().startswith(text)]
    if not ends:
        raise TrainingError(
            f"the chat template writes {behind!r} behind an assistant's turn, which does not begin "
            "with a special or added token of the tokenizer: no token can end a thread. Give a "
            "template whose turns end with such a token (--chat-template)"
        )
    return int(added[max(ends, key=len)])


def chat_token_ids(
    messages: Sequence[ChatMessage], tokenizer: PreTrainedTokenizerBase, *, behind: str = ""
) -> list[int]:
    """Return the tokens of a chat in the tokenizer's template, up to where its answer begins.

    The text `behind` the prompt is tokenized together with it.
    """
    text = _render(tokenizer, messages, add_generation_prompt=True)
    # The template has written the special tokens already.
    return list(tokenizer(text + behind, add_special_tokens=False)["input_ids"])


def _rendered(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the prompt of a short chat, and the chat with its answer."""
    answered = (*_CHAT, ChatMessage("assistant", _ANSWER))
    return (
        _render(tokenizer, _CHAT, add_generation_prompt=True),
        _render(tokenizer, answered, add_generation_prompt=False),
    )


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    **arguments: Any,
) -> str:
    chat = [message.as_dict() for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
        )
    except TemplateError as error:
        raise ChatRefusedError(f"the chat template refuses a chat: {error}") from error
    return str(text)
