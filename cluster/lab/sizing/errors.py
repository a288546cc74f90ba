"""Sizing error."""

from apar_core.errors import AparError


class SizingError(AparError):
    """No plan meets the requirements, or an input is missing or wrong; the message has figures."""
