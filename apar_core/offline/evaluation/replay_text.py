"""Tokenizers for replay: that of a checkpoint, or a stand-in with realistic token counts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase

from apar_core.errors import EvaluationError
from apar_core.formats.control_tokens import (
    SPELLINGS,
    TreeTokens,
    find_control_tokens,
    neutralise,
    plain_spellings,
)
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.prompt_sets import Question
from apar_core.offline.training.chat_format import chat_token_ids
from apar_core.offline.training.example_encoder import build_piece_encoder

LLAMA_TOKENIZER = "llama"
"""Name of the stand-in: mistral_common's first SentencePiece model (32,000 entries)."""

_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ROLES = {"user": "USER", "assistant": "ASSISTANT"}

_LETTER = "a"


def vicuna_prompt(messages: Sequence[ChatMessage]) -> str:
    """Return the prompt of a chat in the format of Vicuna v1.3."""
    system = [message.content for message in messages if message.role == "system"]
    parts = [system[0] if system else _SYSTEM]
    for message in messages:
        if message.role in _ROLES:
            closing = "</s>" if message.role == "assistant" else " "
            parts.append(f"{_ROLES[message.role]}: {message.content}{closing}")
    head, *turns = parts
    return f"{head} {''.join(turns)}ASSISTANT:"


class ModelText:
    """Tokenizer and chat template, with or without control tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        control = find_control_tokens(tokenizer.get_vocab())
        if tokenizer.eos_token_id is None:
            raise EvaluationError(f"the tokenizer of {name} has no end-of-sequence token")
        self.tokenizer = tokenizer
        self.end_id: int = tokenizer.eos_token_id
        self._name = name
        self._control = control
        self._spellings = {} if control is None else plain_spellings(control, tokenizer)
        self.vocabulary_size = len(tokenizer)
        self._encode_piece = build_piece_encoder(
            tokenizer, () if control is None else control.texts
        )
        self._letter = self._encode_piece(_LETTER)

    @property
    def tokens(self) -> TreeTokens:
        """The tree tokens. Raises EvaluationError if the tokenizer has no control tokens."""
        if self._control is None:
            raise EvaluationError(f"the tokenizer of {self._name} has no fork and child token")
        return TreeTokens(self._control.fork_id, self._control.child_id, self.end_id)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of an answer, without control tokens."""
        return self._encode_piece(text)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt by the chat template, or in Vicuna's format if there is none."""
        if self.tokenizer.chat_template is None:
            return self.encode_prompt(vicuna_prompt(messages))
        return neutralise(chat_token_ids(messages, self.tokenizer), self._spellings)

    def encode_question(
        self, question: Question, turn: int = 0, answers: Sequence[str] = ()
    ) -> list[int]:
        """Return the prompt of a turn (from 0), after the answers to earlier turns."""
        if question.raw_prompt:
            return self.encode_prompt(question.turns[turn])
        return self.encode_chat(question.messages(turn, tuple(answers)))

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt without roles."""
        return neutralise(list(self.tokenizer(text)["input_ids"]), self._spellings)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        # Some decoders strip a space at the start of a text, so a letter goes first.
        ids = [*self._letter, *token_ids]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).removeprefix(_LETTER)


def load_text(name_or_path: str) -> ModelText:
    """Load the stand-in by name, a SentencePiece model by file, or the tokenizer of a checkpoint.

    The first two get control tokens and Vicuna's chat format. Raises EvaluationError on failure.
    """
    path = _bundled_model() if name_or_path == LLAMA_TOKENIZER else Path(name_or_path)
    try:
        if path.is_file():
            return ModelText(_sentencepiece_tokenizer(path), name_or_path)
        return ModelText(AutoTokenizer.from_pretrained(name_or_path), name_or_path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"no tokenizer in {name_or_path!r}: {reason}") from error


def _sentencepiece_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    with TemporaryDirectory() as folder:
        # transformers requires this file name.
        copyfile(path, Path(folder) / "tokenizer.model")
        tokenizer: PreTrainedTokenizerBase = LlamaTokenizer.from_pretrained(
            folder, add_bos_token=True
        )
    tokenizer.add_tokens(list(SPELLINGS[0]), special_tokens=True)
    return tokenizer


def _bundled_model() -> Path:
    package = find_spec("mistral_common")
    if package is None or package.origin is None:
        raise EvaluationError(
            "the tokenizer 'llama' is part of mistral_common, which is not installed: give a "
            "checkpoint or a SentencePiece model with --tokenizer"
        )
    path = Path(package.origin).parent / "data" / "tokenizer.model.v1"
    if not path.is_file():
        raise EvaluationError(f"this version of mistral_common does not contain {path.name}")
    return path
