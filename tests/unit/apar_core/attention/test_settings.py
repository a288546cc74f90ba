import pytest

from apar_core.attention.settings import FamilySettings


def test_the_least_saving_of_a_step_is_that_of_its_bytes() -> None:
    # 16 tokens of Llama-7B, and of Llama-3-70B on 4 GPUs.
    found = [FamilySettings.for_blocks(number).min_saved_blocks for number in (262_144, 16_384)]

    assert found == [256, 4096]


@pytest.mark.parametrize(
    ("name", "value"), [("min_rows", 1), ("min_prefix_blocks", 0), ("min_saved_blocks", -1)]
)
def test_a_value_that_groups_nothing_sensible_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* not {value}"):
        FamilySettings(**{name: value})
