"""Forked generation in one process, without a server: for command line, tests and benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from apar_core.engine.answer_tree import TREE_ARG, AnswerTree
from apar_core.engine.thread_outputs import RequestRecord
from apar_core.formats.control_tokens import ControlTokens
from apar_core.formats.resolved_format import ResolvedFormat

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated text.

    `record` holds its tree and statistics; None if the checkpoint has no control tokens.
    `finish_reason` is vLLM's, for example "stop" or "length". `tree` has what each thread
    generated, if the sampling parameters ask for it: `apar_core/engine/answer_tree.py`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    record: RequestRecord | None
    tree: AnswerTree | None = None


@contextmanager
def engine_core_in_this_process() -> Iterator[None]:
    """Set the variable that vLLM reads when it builds an engine; restore it afterwards.

    Programs that this process starts later inherit its environment and choose for themselves.
    """
    before = os.environ.get(IN_PROCESS)
    os.environ[IN_PROCESS] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(IN_PROCESS, None)
        else:
            os.environ[IN_PROCESS] = before


class OfflineEngine:
    """vLLM's `LLM` with the forking scheduler; engine core and model run in this process."""

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        """Load a checkpoint; `engine_args` are arguments of `vllm.LLM`, which override defaults."""
        from vllm import LLM

        from apar_core.engine.async_engine import SCHEDULER_CLS

        defaults: dict[str, Any] = {
            "model": str(model),
            "scheduler_cls": SCHEDULER_CLS,
            "enable_prefix_caching": True,
            "distributed_executor_backend": "uni",
        }
        with engine_core_in_this_process():
            self.llm = LLM(**{**defaults, **engine_args})
        # Any: the processors are ours, and the engine core is in this process.
        self._engine: Any = cast(Any, self.llm.llm_engine)
        self._engine.output_processor.records.keep_trees = True

    @property
    def format(self) -> ResolvedFormat | None:
        """The checkpoint's format of parallel text; None if it is an ordinary model."""
        resolved: ResolvedFormat | None = self._engine.input_processor.format
        return resolved

    @property
    def control_tokens(self) -> ControlTokens | None:
        """Fork and child token; None if the checkpoint has no such pair."""
        control_tokens: ControlTokens | None = self._engine.input_processor.control_tokens
        return control_tokens

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer."""
        return self.llm.get_tokenizer()

    @property
    def scheduler(self) -> Any:
        """The engine core's scheduler."""
        return self._engine.engine_core.engine_core.scheduler

    def chat_prompt(self, user: str, *, system: str | None = None) -> dict[str, Any]:
        """Return a chat with one question, rendered by the engine argument `chat_template`.

        Without it, by the checkpoint's own template.
        """
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": user})
        text = self.tokenizer.apply_chat_template(
            messages,
            chat_template=self.llm.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        # The template writes the first token, which vLLM would add to a text again.
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def generate(
        self,
        prompts: Sequence[Any],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Answer]:
        """Return the answers to vLLM prompts (texts or token ids), in order.

        `sampling` are arguments of vLLM's `SamplingParams`, for all prompts or for each. With n > 1
        the answers to a prompt are adjacent and share one record.
        """
        finished = sorted(self.stream(prompts, sampling), key=lambda each: each[0])
        return [answer for _, answers in finished for answer in answers]

    def stream(
        self,
        prompts: Sequence[Any],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Yield the index and the answers of each prompt as soon as it is finished.

        The arguments are those of `generate`. The engine runs while the caller iterates; whatever
        is unfinished when it stops is aborted.
        """
        from vllm import SamplingParams

        if sampling is None or isinstance(sampling, Mapping):
            sampling = [sampling or {}] * len(prompts)
        params = [SamplingParams(**arguments) for arguments in sampling]
        ids = self.llm.enqueue(list(prompts), params, use_tqdm=False)
        # Outputs have the number that vLLM counts; the ids returned here have a random suffix.
        indices = {name.partition("-")[0]: index for index, name in enumerate(ids)}
        records = self._engine.output_processor.records
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        record = records.take(output.request_id)
                        answers = [
                            Answer(
                                text=completion.text,
                                token_ids=tuple(completion.token_ids),
                                finish_reason=str(completion.finish_reason),
                                record=record,
                                tree=getattr(completion, TREE_ARG, None),
                            )
                            for completion in output.outputs
                        ]
                        yield indices.pop(output.request_id), answers
        finally:
            if indices:
                self._engine.abort_request(list(indices))

    def shutdown(self) -> None:
        """Shut the engine down and free its memory."""
        self._engine.engine_core.shutdown()
