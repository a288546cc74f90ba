"""The engine of `apar evaluate forks`: answers questions, scores texts, and replays under load."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from apar_core.offline.evaluation.fork_answers import GeneratedAnswer, fork_facts
from apar_core.offline.training.chat_format import turn_end_id
from apar_core.tree.threads import thread_scripts
from cluster.lab.experiments.driver import RunPlan, drive
from cluster.lab.experiments.engine import ExperimentEngine, RunConditions
from cluster.lab.experiments.program import ReplayedRequest

if TYPE_CHECKING:
    from apar_core.engine.offline_engine import Answer, OfflineEngine
    from apar_core.engine.thread_outputs import TextToken
    from apar_core.offline.evaluation.forks import ReplayedAnswer, RunFigures

_ENABLED = "apar_enabled"
# Longer than any run: no samples are taken.
_NO_SAMPLES_S = 1e9


class ReplayingForkEngine:
    """An engine with the logits processor `Replay`; implements `ForkEngine` of the evaluation."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._end_id = turn_end_id(self._tokenizer)
        resolved = engine.format
        control = () if resolved is None else resolved.uncounted_ids
        self._waits = resolved is not None and resolved.definition.waits
        # A format whose parent waits bans no token.
        self._watched = frozenset(control)
        self._fork_id = -1 if not control else control[0]
        self._measured = ExperimentEngine(engine, (*control, self._end_id))

    @property
    def context_tokens(self) -> int:
        """The longest sequence, prompt included."""
        return int(self._engine.scheduler.max_model_len)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        *,
        forks: bool,
    ) -> list[GeneratedAnswer]:
        """Answer prompts of token ids; `forks` applies to all of them.

        In greedy answers that may fork, tokens are counted where the model preferred a banned
        control token: vLLM's log-probabilities are those before the bans.
        """
        watched = [forks and bool(self._watched) and each["temperature"] == 0 for each in sampling]
        arguments = [
            {**each, "logprobs": 1 if is_watched else None, "extra_args": {_ENABLED: forks}}
            for each, is_watched in zip(sampling, watched, strict=True)
        ]
        found = self._engine.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts], arguments
        )
        return [
            self._forked(each, is_watched) if forks else self._unforked(each)
            for each, is_watched in zip(found, watched, strict=True)
        ]

    def log_losses(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[float]:
        """Return the log-loss (nats) of each text after its prompt, summed over its tokens."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, extra_args={_ENABLED: False}
        )
        rows = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        prompts_of_vllm: list[Any] = [{"prompt_token_ids": row} for row in rows]
        # Any: vLLM also has a flat form, which is not requested here.
        outputs: list[Any] = self._engine.llm.generate(prompts_of_vllm, params, use_tqdm=False)
        return [
            -sum(
                known[token_id].logprob
                for token_id, known in zip(
                    row[len(prompt) :], output.prompt_logprobs[len(prompt) :], strict=True
                )
            )
            for prompt, row, output in zip(prompts, rows, outputs, strict=True)
        ]

    def run(
        self, answers: Sequence[ReplayedAnswer], *, requests: int, num_answers: int
    ) -> RunFigures:
        """Replay answers in a closed loop of `requests` requests; measure `num_answers` of them.

        Further answers keep the engine busy before and after. The KV cache is empty at the start.
        Raises EvaluationError if a generated text differs from its answer.
        """
        # Imports transformers, which takes seconds.
        from apar_core.offline.evaluation.forks import RunFigures

        def program(index: int) -> ReplayedRequest:
            answer = answers[index % len(answers)]
            return ReplayedRequest(answer, forks=answer.forked)

        plan = RunPlan(RunConditions(), program, num_answers, clients=requests, is_closed_loop=True)
        found = drive(self._measured, plan, sample_s=_NO_SAMPLES_S)
        text_tokens = sum(each.text_tokens for each in found.served)
        known = [each.statistics for each in found.served if each.statistics is not None]
        # A parent that waited did not generate the text between its children.
        generated = text_tokens - sum(each.forced_tokens for each in known)
        return RunFigures(
            answers=len(found.served),
            text_tokens=text_tokens,
            duration_s=found.duration_s,
            tokens_per_s=found.whole.tokens_per_s * text_tokens / generated,
            latency_s=statistics.fmean(each.latency_s for each in found.served),
            steps=found.counts.steps,
            peak_kv_tokens=found.counts.peak_kv_tokens,
            attended_tokens=(
                statistics.fmean(each.attended_tokens for each in known) if known else None
            ),
        )

    def shutdown(self) -> None:
        """Free the engine's memory."""
        self._measured.shutdown()

    def _forked(self, answer: Answer, is_watched: bool) -> GeneratedAnswer:
        # Imports vLLM, which takes seconds.
        from apar_core.engine.thread_outputs import plain_token

        assert answer.record is not None, "a checkpoint with control tokens records its trees"
        (tree,) = answer.record.trees
        records = tree.threads.values()
        scripts = thread_scripts(tree, plain_token(self._fork_id), plain_token(self._end_id))
        return GeneratedAnswer(
            text=answer.text,
            token_ids=answer.token_ids,
            threads={key: [token.token_id for token in own] for key, own in scripts.items()},
            finish_reason=answer.finish_reason,
            statistics=asdict(answer.record.statistics),
            num_unended=sum(not (each.ended or each.is_closed) for each in records),
            misplaced=(
                sum(self._is_misplaced(token) for own in scripts.values() for token in own)
                if is_watched
                else None
            ),
            forks=None if self._waits else fork_facts(tree, self._decode),
        )

    def _unforked(self, answer: Answer) -> GeneratedAnswer:
        token_ids = answer.token_ids
        # vLLM returns the end token of a request without forks.
        if answer.finish_reason == "stop" and token_ids[-1:] != ():
            token_ids = token_ids[:-1]
        return GeneratedAnswer(
            answer.text,
            token_ids,
            {"": [*token_ids, self._end_id]},
            answer.finish_reason,
            {} if answer.record is None else asdict(answer.record.statistics),
            num_unended=int(answer.finish_reason == "length"),
        )

    def _is_misplaced(self, token: TextToken) -> bool:
        """Return whether the model preferred a control token."""
        if token.logprobs is None:
            return False
        # The first column has the token itself, the second one the most likely token.
        return int(token.logprobs.logprob_token_ids[0, 1]) in self._watched

    def _decode(self, tokens: Sequence[TextToken]) -> str:
        ids = [token.token_id for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
