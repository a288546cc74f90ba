import pytest

from apar_core.attention.settings import FamilySettings


@pytest.mark.parametrize(
    ("name", "value"), [("min_rows", 1), ("min_prefix_blocks", 0), ("min_saved_blocks", -1)]
)
def test_a_value_that_groups_nothing_sensible_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* not {value}"):
        FamilySettings(**{name: value})
