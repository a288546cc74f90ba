"""An offline engine in a process of its own, so that tests can run several, each cleanly ended."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from apar_core.models.apar_tiny import checkpoint_path

Result = TypeVar("Result")
START_TIMEOUT_S = 180


def engine_args(**overrides: Any) -> dict[str, Any]:
    """Arguments of an `OfflineEngine` with the embedded model, these instead of the usual ones."""
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
    """Runs functions that take an `OfflineEngine` and return something that can be pickled."""

    def __init__(self, **overrides: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = engine_args(**overrides)
        self._process = context.Process(target=_serve, args=(theirs, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(START_TIMEOUT_S)

    def call(self, function: Callable[..., Result], *args: Any, timeout_s: float = 300) -> Result:
        """Run `function(engine, *args)` there; raises what it raises."""
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


def _serve(connection: Connection, arguments: dict[str, Any]) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from apar_core.engine.offline_engine import OfflineEngine
    from tests.integration.small_blocks import offer_small_blocks

    engine: OfflineEngine | None = None
    try:
        if arguments["block_size"] % 32:
            offer_small_blocks()
        engine = OfflineEngine(**arguments)
        connection.send((None, None, ""))
        while True:
            function, args = connection.recv()
            try:
                connection.send((function(engine, *args), None, ""))
            except Exception as error:  # noqa: BLE001  # sent on, and raised by the test
                connection.send((None, error, traceback.format_exc()))
    except EOFError:
        pass  # the test has closed its end
    except Exception as error:  # noqa: BLE001  # the engine did not start: raised by the test
        connection.send((None, error, traceback.format_exc()))
    finally:
        if engine is not None:
            engine.shutdown()
