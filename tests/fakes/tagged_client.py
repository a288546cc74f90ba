"""A client of our output processor with vLLM's detokenizer, which reads a thread-tagged stream."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from apar_core.engine.output_processor import ForkOutputProcessor
from apar_core.engine.request_follower import RequestFollower
from apar_core.engine.resume_request import completed
from apar_core.engine.thread_tags import StreamTags
from apar_core.fork_parameters import EXTRA_ARG, ForkParameters
from apar_core.journal import Journal
from apar_core.models.apar_tiny import checkpoint_path
from tests.fakes.tagged_streams import TaggedReader

TOKENIZER: Any = get_tokenizer(str(checkpoint_path()))
PAD, END, FORK, CHILD = 0, 2, 3, 4
PARAMETERS = ForkParameters(FORK, (CHILD,), (CHILD,), True, 16, 100, (END,))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


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

    def step(self, *outputs: EngineCoreOutput) -> list[dict[str, Any]]:
        """Process outputs; return the updates of the chunk, if one is taken."""
        self.processor.process_outputs(list(outputs))
        if self.follower.tags is None or not self.takes:
            return []
        apar = self.follower.tags.take()
        self.reader.read(apar)
        updates: list[dict[str, Any]] = apar["updates"]
        return updates
