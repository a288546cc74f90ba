"""Run an `OfflineEngine` in a process of its own, so that tests can use several in turn."""

import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from apar_core.models.apar_tiny import checkpoint_path

Result = TypeVar("Result")
START_TIMEOUT_S = 180
# Imported once, by the server that every engine's process is forked from: the imports take four
# times as long as building the engine does.
PRELOADED = (
    "apar_core.engine.offline_engine",
    "apar_core.engine.async_engine",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
)


def engine_args(**overrides: Any) -> dict[str, Any]:
    """Arguments of an `OfflineEngine` with the embedded model; `overrides` replace the defaults."""
    return {
        "model": str(checkpoint_path()),
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 768,
        "max_num_seqs": 128,
        "kv_cache_memory_bytes": 256 << 20,
        **overrides,
    }


class EngineProcess:
    """Calls functions that take an `OfflineEngine` and return a picklable value.

    `environment` sets variables in the engine's process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, **overrides: Any) -> None:
        # Compiling vLLM's n-gram proposer takes half a minute, and running it without seconds.
        os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._connection, theirs = context.Pipe()
        arguments = engine_args(**overrides)
        self._process = context.Process(
            target=_serve, args=(theirs, arguments, dict(environment or {})), daemon=True
        )
        self._process.start()
        theirs.close()
        self.warnings: list[str] = self._receive(START_TIMEOUT_S)
        """What our code logged as warnings while the engine started."""

    def call(self, function: Callable[..., Result], *args: Any, timeout_s: float = 300) -> Result:
        """Return `function(engine, *args)`, run in the engine's process; raise what it raises."""
        self._connection.send((function, args))
        result: Result = self._receive(timeout_s)
        return result

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            self._process.kill()
            raise TimeoutError(f"the engine's process did not answer within {timeout_s} s")
        result, error, trace = self._connection.recv()
        if error is not None:
            error.add_note(trace)
            raise error
        return result


class _Warnings(logging.Handler):
    """Keeps the messages of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _serve(connection: Connection, arguments: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from apar_core.engine.offline_engine import OfflineEngine
    from tests.integration.small_blocks import offer_small_blocks

    engine: OfflineEngine | None = None
    warnings = _Warnings()
    logging.getLogger("apar_core").addHandler(warnings)
    try:
        if arguments["block_size"] % 32:
            offer_small_blocks()
        engine = OfflineEngine(**arguments)
        connection.send((warnings.messages, None, ""))
        while True:
            function, args = connection.recv()
            try:
                connection.send((function(engine, *args), None, ""))
            except Exception as error:  # noqa: BLE001  # raised by the caller
                connection.send((None, error, traceback.format_exc()))
    except EOFError:
        pass  # closed by the test
    except Exception as error:  # noqa: BLE001  # raised by the constructor
        connection.send((None, error, traceback.format_exc()))
    finally:
        if engine is not None:
            engine.shutdown()
