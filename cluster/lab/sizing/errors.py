"""Why no plan can be made."""

from apar_core.errors import AparError


class SizingError(AparError):
    """The wishes cannot be met, or something to plan with is missing; the message has figures."""
