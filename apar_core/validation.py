"""What pydantic complains of, in one line."""

from pydantic import ValidationError


def validation_summary(error: ValidationError) -> str:
    """Return the first complaint as "field: what is wrong with it"."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "line"
    return f"{place}: {first['msg']}"
