from pathlib import Path

from tests.soak.samples import Growth, Sample, growths, write_csv


def test_growth_is_from_the_end_of_the_warm_up_to_the_end() -> None:
    samples = [Sample(second, "a 1", 100 + second) for second in range(0, 101, 5)]
    samples += [Sample(second, "gone 2", 50) for second in range(0, 60, 5)]

    (growth,) = growths(samples, warm_up_s=50)

    assert growth == Growth("a 1", 155, 195)
    assert not growth.is_within(0.1, 30)
    assert growth.is_within(0.3, 0)
    assert growth.is_within(0.0, 40)


def test_samples_are_rows(tmp_path: Path) -> None:
    write_csv([Sample(1, "a 1", 2.25)], tmp_path / "m.csv")

    assert (tmp_path / "m.csv").read_text().split() == ["seconds,process,rss_mib", "1.0,a", "1,2.2"]
