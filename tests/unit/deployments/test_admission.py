import pytest

from apar_core.errors import CapacityError
from deployments.admission import Admission


def test_the_bound_is_exact() -> None:
    admission = Admission(max_running=2, max_queued=1)
    places = [admission.admit() for _ in range(3)]
    for place in places:
        place.__enter__()

    with pytest.raises(CapacityError) as raised, admission.admit():
        pass

    assert admission.inside == 3
    assert raised.value.retry_after_s == 1.0
    places[0].__exit__(None, None, None)
    with admission.admit():
        assert admission.inside == 3


def test_a_request_that_fails_gives_its_place_back() -> None:
    admission = Admission(max_running=1, max_queued=0)

    with pytest.raises(ValueError, match="broken"), admission.admit():
        raise ValueError("broken")

    assert admission.inside == 0
