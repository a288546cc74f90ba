"""The reason of a replica that does not start: one line, and a remedy in this project's words."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from apar_core.errors import CheckpointError
from deployments.app.service import last_error
from deployments.replica.start_failure import last_printed, start_error

# Messages of vLLM 0.32.
TOO_SMALL = (
    "ValueError: To serve at least one request with the model's max seq len (2048), (0.01 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (0.0 GiB). Based on the "
    "available memory, the estimated maximum model length is 224. Try increasing "
    "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
    "`max_model_len` when initializing the engine. See https://docs.vllm.ai for more details."
)
TOO_LARGE = (
    "ValueError: Available memory on node 0 (17.94/23.54 GiB) on kv cache allocation is less than "
    "requested memory for kv (300.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE,"
    " or reduce CPU memory used by other processes."
)
UNREACHABLE = (
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
    "them in the cached files.\nCheck your internet connection or see how to run the library in "
    "offline mode at 'https://huggingface.co/docs/transformers/installation#offline-mode'."
)
REFERS = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("failure", "cause", "remedy"),
    [
        (TOO_SMALL, "maximum model length is 224.", "Raise the model's `kv_cache_gib`"),
        (TOO_LARGE, "memory for kv (300.0 GiB).", "Lower the model's `kv_cache_gib`"),
        (UNREACHABLE, "in the cached files.", "Check the name and the network"),
        ("AssertionError: odd", "AssertionError: odd", "`apar doctor --model` checks"),
    ],
)
def test_the_engines_own_error_is_shown_with_a_remedy(
    failure: str, cause: str, remedy: str
) -> None:
    first, second, *_ = str(start_error(RuntimeError(REFERS), failure)).splitlines()

    assert first.endswith(cause)
    assert "root cause" not in first
    assert second.startswith(remedy) or remedy in second


def test_a_killed_engine_names_the_signal() -> None:
    error = RuntimeError(REFERS.replace("{}", "{'EngineCore_DP0': -9}"))

    first, second, *_ = str(start_error(error, None)).splitlines()

    assert first == "the engine's process was ended by SIGKILL"
    assert "memory is short" in second


def test_an_invalid_argument_is_one_line_without_pydantics_additions() -> None:
    class Arguments(BaseModel):
        max_model_len: int

    with pytest.raises(ValidationError) as raised:
        Arguments.model_validate({"max_model_len": "2k"})

    first, second, *_ = str(start_error(raised.value, None)).splitlines()

    assert first.startswith("max_model_len: Input should be a valid integer")
    assert first.endswith(" (got '2k')")
    assert second == "Correct the model's `engine` settings."


def test_a_process_that_cannot_import_is_read_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(
        "Traceback (most recent call last):\n  ...\nValueError: older\nTraceback ...\n"
        "    import gone\nModuleNotFoundError: No module named 'gone'\nother: text\n"
    )

    assert last_printed(log) == "ModuleNotFoundError: No module named 'gone'"
    log.write_text("Triton is installed\n")
    assert last_printed(log) is None


def test_our_own_errors_keep_their_words() -> None:
    error = CheckpointError("vLLM has no engine argument 'a'; did you mean 'b'?")

    first, *rest = str(start_error(error, None)).splitlines()

    assert first == str(error)
    assert not any("apar doctor" in line for line in rest)


def test_ray_serves_message_becomes_the_last_error() -> None:
    message = (
        "The deployment failed to start 1 times in a row. See controller logs for details. Error:\n"
        'ray::ServeReplica()\n  File "a.py", line 1, in f\n    raise\n'
        "RuntimeError: Traceback (most recent call last):\n  ...\n"
        "RuntimeError: Engine core initialization failed.\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  ...\n"
        "deployments.config.files.StartError: ValueError: too small\n"
        "Raise `kv_cache_gib`.\nLog: /a.out"
    )

    assert last_error(message) == "ValueError: too small\nRaise `kv_cache_gib`.\nLog: /a.out"
    assert last_error("a\nb.C\nRuntimeError: x: y\n") == "RuntimeError: x: y"
    assert last_error("The replicas are starting.") == "The replicas are starting."
