from __future__ import annotations

from pathlib import Path

import pytest

from apar_core.errors import EvaluationError
from cluster.lab.experiments.parts import PARTS_FILE, PartStore


def test_a_part_is_done_once_also_by_the_next_run(tmp_path: Path) -> None:
    done = []

    def do() -> dict[str, int]:
        done.append("part")
        return {"steps": 7}

    assert PartStore(tmp_path, {"model": "a"}).get_or_do("one", do) == {"steps": 7}
    again = PartStore(tmp_path, {"model": "a"})

    assert again.has("one")
    assert again.get_or_do("one", do) == {"steps": 7}
    assert not again.has("two")
    assert done == ["part"]


def test_a_part_that_failed_is_done_again(tmp_path: Path) -> None:
    store = PartStore(tmp_path, {})

    def fail() -> dict[str, int]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.get_or_do("one", fail)

    assert PartStore(tmp_path, {}).get_or_do("one", lambda: {"steps": 1}) == {"steps": 1}


def test_a_line_that_was_being_written_when_the_run_ended_is_no_part(tmp_path: Path) -> None:
    PartStore(tmp_path, {}).get_or_do("one", lambda: {"steps": 1})
    with (tmp_path / PARTS_FILE).open("a") as file:
        file.write('{"name": "two", "da')

    store = PartStore(tmp_path, {})

    assert (store.has("one"), store.has("two")) == (True, False)


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    PartStore(tmp_path, {"model": "a"}).add("one", {})

    with pytest.raises(EvaluationError, match="model was 'a', is 'b'"):
        PartStore(tmp_path, {"model": "b"})


def test_a_folder_without_a_part_is_free_for_other_settings(tmp_path: Path) -> None:
    PartStore(tmp_path, {"model": "a"})

    PartStore(tmp_path, {"model": "b"}).add("one", {"steps": 1})

    assert PartStore(tmp_path, {"model": "b"}).find("one") == {"steps": 1}
