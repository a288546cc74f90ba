"""Text as the token ids of a model: that of a checkpoint, or a stand-in of realistic counts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from apar_core.control_tokens import find_control_tokens, neutralise, plain_spellings
from apar_core.data.records import ChatMessage
from apar_core.errors import EvaluationError
from apar_core.training.packing import TreeTokens
from apar_core.training.piece_encoder import build_piece_encoder

LLAMA_TOKENIZER = "llama"
"""Name of the stand-in: the 32,000 entries of mistral_common's first SentencePiece model."""

_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ROLES = {"user": "USER", "assistant": "ASSISTANT"}


class TextTokenizer(Protocol):
    """What replaying and generating ask of a tokenizer."""

    @property
    def tokens(self) -> TreeTokens:
        """The ids that shape a tree."""

    @property
    def vocabulary_size(self) -> int:
        """Entries, control tokens included."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of an answer, no control token among them."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of a prompt that asks for the assistant's turn."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt that is completed as it is."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids."""


def vicuna_prompt(messages: Sequence[ChatMessage]) -> str:
    """Return a chat as Vicuna v1.3 reads it, up to where its answer begins."""
    system = [message.content for message in messages if message.role == "system"]
    parts = [system[0] if system else _SYSTEM]
    for message in messages:
        if message.role in _ROLES:
            closing = "</s>" if message.role == "assistant" else " "
            parts.append(f"{_ROLES[message.role]}: {message.content}{closing}")
    head, *turns = parts
    return f"{head} {''.join(turns)}ASSISTANT:"


class CheckpointText:
    """The tokenizer of a checkpoint with control tokens, and its chat template."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        control_tokens = find_control_tokens(tokenizer.get_vocab())
        if control_tokens is None:
            raise EvaluationError(f"the tokenizer of {name} has no fork and child token")
        if tokenizer.eos_token_id is None:
            raise EvaluationError(f"the tokenizer of {name} has no end-of-sequence token")
        self._tokenizer = tokenizer
        self._spellings = plain_spellings(control_tokens, tokenizer)
        self.tokens = TreeTokens(
            control_tokens.fork_id, control_tokens.child_id, tokenizer.eos_token_id
        )
        self.vocabulary_size = len(tokenizer)
        self._encode_piece = build_piece_encoder(
            tokenizer, (control_tokens.fork_id, control_tokens.child_id)
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a piece of an answer, no control token among them."""
        return self._encode_piece(text)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt by the chat template, or in Vicuna's form where there is none."""
        if self._tokenizer.chat_template is None:
            return self.encode_prompt(vicuna_prompt(messages))
        chat = [message.as_dict() for message in messages]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return neutralise(ids, self._spellings)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt that is completed as it is."""
        return neutralise(list(self._tokenizer(text)["input_ids"]), self._spellings)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class SentencePieceText:
    """A SentencePiece model with a fork and a child token behind its entries; Vicuna's chats."""

    def __init__(self, model_file: Path) -> None:
        # An optional package: vLLM brings it.
        from sentencepiece import SentencePieceProcessor

        self._processor: Any = SentencePieceProcessor(model_file=str(model_file))
        size = self._processor.vocab_size()
        self.tokens = TreeTokens(size, size + 1, self._processor.eos_id())
        self.vocabulary_size = size + 2
        # SentencePiece puts a space before a text, so a piece is encoded behind a line break.
        self._context = "\n"
        self._num_context_ids = len(self._processor.encode(self._context))

    def encode(self, text: str) -> list[int]:
        """Return ids that decode to exactly the text."""
        ids: list[int] = []
        # The character that stands for a space in the vocabulary has to be spelled in bytes.
        for number, part in enumerate(text.split("▁")):
            if number:
                ids += [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in "▁".encode()]
            ids += self._processor.encode(self._context + part)[self._num_context_ids :]
        return ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt in Vicuna's form."""
        turns = vicuna_prompt(messages).split("</s>")
        ids = [self._processor.bos_id(), *self._processor.encode(turns[0])]
        for turn in turns[1:]:
            ids += [self.tokens.end_id, *self._processor.encode(turn)]
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt that is completed as it is."""
        return [self._processor.bos_id(), *self._processor.encode(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids that were encoded piece by piece."""
        return b"".join(map(self._bytes, token_ids)).decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        if token_id >= self._processor.vocab_size() or self._processor.is_control(token_id):
            return b""
        piece = str(self._processor.id_to_piece(token_id))
        if self._processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def load_text(name_or_path: str) -> TextTokenizer:
    """Return the stand-in by its name, a SentencePiece model by its file, or a checkpoint's.

    Raises EvaluationError if there is none, or none that can fork.
    """
    if name_or_path == LLAMA_TOKENIZER:
        return SentencePieceText(_bundled_model())
    path = Path(name_or_path)
    if path.is_file():
        return SentencePieceText(path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EvaluationError(f"no tokenizer in {name_or_path!r}: {reason}") from error
    return CheckpointText(tokenizer, name_or_path)


def _bundled_model() -> Path:
    package = find_spec("mistral_common")
    if package is None or package.origin is None:
        raise EvaluationError(
            "the tokenizer 'llama' is a file of mistral_common, which is not installed; give a "
            "checkpoint or a SentencePiece model with --tokenizer"
        )
    path = Path(package.origin).parent / "data" / "tokenizer.model.v1"
    if not path.is_file():
        raise EvaluationError(f"this version of mistral_common has no {path.name}")
    return path
