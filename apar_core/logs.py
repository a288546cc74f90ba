"""Loggers of this project, and their set-up in an entry point."""

import logging


def get_logger(name: str) -> logging.Logger:
    """Logger of a module, by the module's name."""
    return logging.getLogger(name)


def configure_logging(level: str = "INFO") -> None:
    """Send this project's messages to stderr; called once, by each entry point."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for package in ("apar_core", "cluster", "deployments"):
        logger = logging.getLogger(package)
        logger.setLevel(level)
        logger.handlers = [handler]
        logger.propagate = False
