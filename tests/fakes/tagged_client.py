"""A client of our output processor with vLLM's detokenizer, which reads a thread-tagged stream."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.engine.request_follower import RequestFollower
from apar_core.engine.resume_request import completed
from apar_core.engine.thread_tags import StreamTags
from apar_core.fork_parameters import EXTRA_ARG, ForkParameters
from apar_core.journal import Journal
from apar_core.models.apar_tiny import checkpoint_path
from tests.fakes.tagged_streams import TaggedReader
from tests.unit.apar_core.tree.scripts import Event

TOKENIZER: Any = get_tokenizer(str(checkpoint_path()))
PAD, END, FORK, CHILD = 0, 2, 3, 4
PARAMETERS = ForkParameters(FORK, (CHILD,), (CHILD,), True, 16, 100, (END,))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


# Letters, white space, a special token, and the bytes of longer characters one by one.
BYTES = [PAD, *(token for text in ("a", "b", " a", "\n", "é", "日", "🎸") for token in ids(text))]


def outputs_of(events: list[Event], tokens: list[int]) -> list[EngineCoreOutput]:
    """Return the engine's outputs for the events of a random tree, whose items name tokens."""
    names = {"root": "r"}
    num_children: Counter[str] = Counter()
    outputs = []
    for event in events:
        name, reason, token_ids = names[event.thread], None, [FORK]
        if event.kind == "fork":
            names[event.child] = f"{name}~{num_children[name]}"
            num_children[name] += 1
        elif event.kind == "text":
            token_ids = [tokens[item % len(tokens)] for item in event.items]
        else:
            ends = event.kind == "end"
            token_ids, reason = [END] * ends, FinishReason.STOP if ends else FinishReason.LENGTH
        outputs.append(EngineCoreOutput(name, token_ids, finish_reason=reason))
    return outputs


class TaggedClient:
    """A streaming client: collects the ordered text and reads the updates of every chunk."""

    def __init__(
        self, resume: Journal | None = None, *, tagged: bool = True, **params: Any
    ) -> None:
        self.processor: Any = ForkOutputProcessor(TOKENIZER, log_stats=False)
        self.follower = RequestFollower(keeps_journal=True, resume=resume)
        self.follower.tags = StreamTags("c") if tagged else None
        self.processor.follow("c", self.follower)
        self.reader = TaggedReader()
        self.text = ""
        self.num_chunks = 0
        self.finish_reason: str | None = None
        self.takes = True
        parameters = params.pop("parameters", PARAMETERS)
        extra_args = None if parameters is None else {EXTRA_ARG: parameters.to_extra_arg()}
        sampling = SamplingParams(
            max_tokens=500, output_kind=RequestOutputKind.DELTA, extra_args=extra_args, **params
        )
        sampling.update_from_generation_config({}, END)
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=ids("Hi"),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        request.external_req_id = "c"
        self.processor.add_request(request, None, queue=self)
        if resume is not None:
            self.processor.replay(request, completed(request, resume, 10**6))

    def put(self, output: Any) -> None:
        """Receive an output of the request."""
        self.num_chunks += 1
        self.text += output.outputs[0].text
        self.finish_reason = output.outputs[0].finish_reason

    def step(self, *outputs: EngineCoreOutput) -> list[dict[str, Any]]:
        """Process outputs; return the updates of the chunk, if one is taken."""
        self.processor.process_outputs(list(outputs))
        if self.follower.tags is None or not self.takes:
            return []
        apar = self.follower.tags.take()
        self.reader.read(apar)
        updates: list[dict[str, Any]] = apar["updates"]
        return updates
