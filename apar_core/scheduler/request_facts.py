"""What our parameters say of one of vLLM's requests."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus

from apar_core.fork_parameters import ForkParameters


def fork_parameters(request: Request) -> ForkParameters | None:
    """The parameters that the API process wrote; None where the checkpoint cannot fork."""
    if request.sampling_params is None:
        return None
    return ForkParameters.from_extra_args(request.sampling_params.extra_args)


def ended_itself(request: Request, parameters: ForkParameters) -> bool:
    """Whether a stopped request's last token is an end-of-thread token of the model."""
    if request.status != RequestStatus.FINISHED_STOPPED:
        return False
    return request.all_token_ids[-1] in parameters.end_ids
