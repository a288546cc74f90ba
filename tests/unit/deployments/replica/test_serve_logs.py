"""Ray Serve's log handlers survive vLLM."""

import inspect
import logging
import logging.config
from logging.handlers import MemoryHandler
from pathlib import Path

from ray.serve._private import logging_utils

from deployments.replica.replica import kept_serve_logs


def test_ray_serves_log_file_survives_vllms_configuration(tmp_path: Path) -> None:
    serve_logger = logging.getLogger("ray.serve")
    file = logging.FileHandler(tmp_path / "serve.log")
    handler = MemoryHandler(capacity=1, target=file)
    serve_logger.addHandler(handler)
    try:
        with kept_serve_logs():
            # As vLLM does on import.
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
            assert handler.target is None
        serve_logger.warning("still written")

        assert handler.target is file
        assert (tmp_path / "serve.log").read_text() == "still written\n"
    finally:
        serve_logger.removeHandler(handler)
        file.close()


def test_a_restarted_controller_asks_for_the_handlers_file() -> None:
    source = inspect.getsource(logging_utils.get_component_logger_file_path)

    assert "handler.target.baseFilename" in source
