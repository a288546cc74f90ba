"""Why a replica did not start, in one line, and what to do about it."""

import re
import signal
from pathlib import Path

from pydantic import ValidationError

from apar_core.engine.start_stages import describe_error
from apar_core.errors import AparError
from deployments.config import StartError

_MAX_CHARS = 500
# Advice of vLLM and others, which names options of their own.
_ADVICE = re.compile(
    r"(?<=[.)\]]) "
    r"(?:Try |See |Decrease |Reduce |To |On the CPU|Check your|You can |Please |This could ).*"
)
# vLLM's exception when a process of the engine fails.
_REFERS = "See root cause above"
# The last line of a traceback, or of a crash.
_PRINTED = re.compile(
    r"^((?:\w+\.)*\w+(?:Error|Exception): .+|Fatal Python error: .+)", re.MULTILINE
)
_TAIL_BYTES = 2**16
# vLLM's exception when a process of the engine ends without having reported an error.
_KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*: -(\d+)")
_REMEDIES = (
    (
        r"No available memory for the cache blocks|KV cache is needed, which is larger",
        "Raise the model's `kv_cache_gib` (CPU) or `gpu_memory_share` (GPU), or lower "
        "`engine.max_model_len`.",
    ),
    (
        r"on kv cache|Available memory on node",
        "Lower the model's `kv_cache_gib`, or end other programs.",
    ),
    (
        r"Free memory on device",
        "Lower the model's `gpu_memory_share`, or end other programs on the GPU.",
    ),
    (
        r"out of memory|OutOfMemoryError|Cannot allocate memory|MemoryError",
        "Lower the model's `kv_cache_gib` (CPU) or `gpu_memory_share` (GPU), or its "
        "`max_concurrency`, or spread it over more GPUs with `gpus_per_replica`.",
    ),
    (
        r"SIGKILL",
        "The kernel does this when memory is short: lower the model's `kv_cache_gib`, or end other "
        "programs.",
    ),
    (r"greater than the derived max_model_len", "Lower the model's `engine.max_model_len`."),
    (
        r"does not recognize this architecture|are not supported for now",
        "The installed vLLM cannot serve this model; choose another checkpoint.",
    ),
    (
        r"couldn't connect to '?https?://|offline mode|LocalEntryNotFound|Name or service not known"
        r"|name resolution|Max retries exceeded",
        "The name is no folder on this machine, so it was looked up on the Hugging Face hub. Check "
        "the name and the network, or give the folder of a checkpoint.",
    ),
    (
        r"not a valid model identifier|Repository Not Found|RepositoryNotFound",
        "Check the name: neither a folder here nor a model on the Hugging Face hub has it. For a "
        "private model, set HF_TOKEN.",
    ),
    (r"gated repo|GatedRepo|401 Client Error", "Ask for access to the model, and set HF_TOKEN."),
    (r"No space left on device|Disk quota exceeded", "Free some disk space, or set TMPDIR."),
    (r"Read-only file system|Permission denied", "Set HOME to a folder that can be written."),
    (
        r"safetensor|Error while deserializing|Cannot find any model weights",
        "Copy or download the checkpoint again.",
    ),
    (
        r"backend tokenizer|[Tt]okenizer",
        "Check that the checkpoint's folder contains its tokenizer.",
    ),
    (r"Loading lora", "Check the `path` of the adapter: a folder with adapter_config.json."),
)


def start_error(error: BaseException, engine_failure: str | None) -> StartError:
    """Return the error of a replica that does not start.

    `engine_failure` is the first error of its engine's processes, None if none has reported one:
    then `error` is the cause. The message also names this process's log file, if it has one.
    """
    printed = None
    if isinstance(error, AparError):
        cause = str(error)
    else:
        refers = _REFERS in str(error)
        printed = last_printed(_file(2)) if refers and not engine_failure else None
        cause = engine_failure or printed or _killed(error) or describe_error(error)
    if isinstance(error, AparError):
        lines = [_one_line(cause)]
    else:
        lines = [_ADVICE.sub("", _one_line(cause)), _remedy(error, cause)]
    if log := _file(2 if printed else 1):
        lines.append(f"Log: {log}")
    return StartError("\n".join(lines))


def _killed(error: BaseException) -> str | None:
    found = _KILLED.search(str(error))
    if found is None:
        return None
    try:
        name = signal.Signals(int(found[1])).name
    except ValueError:
        name = f"signal {found[1]}"
    return f"the engine's process was ended by {name}"


def _remedy(error: BaseException, cause: str) -> str:
    found = (remedy for pattern, remedy in _REMEDIES if re.search(pattern, cause))
    if isinstance(error, ValidationError):
        return next(found, "Correct the model's `engine` settings.")
    return next(found, "`apar doctor --model` checks a checkpoint and the installed packages.")


def _one_line(cause: str) -> str:
    text = " ".join(cause.split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."


def last_printed(log: Path | None) -> str | None:
    """Return the last error that Python has printed to a log file, None if there is none.

    A process of the engine that cannot even import its modules reports nothing in another way.
    """
    if log is None:
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        found = _PRINTED.findall(file.read().decode(errors="replace"))
    return found[-1] if found else None


def _file(descriptor: int) -> Path | None:
    """Return the log file that this process and its engine write their output to."""
    try:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return None
    return path if path.suffix in (".out", ".err", ".log") and path.is_file() else None
