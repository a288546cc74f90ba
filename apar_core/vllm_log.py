"""Our events in the log of vLLM's own server."""

import logging

_OURS = "apar_core"
_VLLM = "vllm"


def log_as_vllm() -> None:
    """Write our events as vLLM's, with its level, if this process handles ours in no other way.

    vLLM sets up the loggers below its own name only. May be called more than once.
    """
    ours = logging.getLogger(_OURS)
    if not ours.hasHandlers():
        ours.addHandler(_ToVllm())
        ours.setLevel(logging.getLogger(_VLLM).getEffectiveLevel())


class _ToVllm(logging.Handler):
    """Hands records to vLLM's logger, whose handlers vLLM replaces with each engine."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(_VLLM).handle(record)
