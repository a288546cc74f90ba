"""Memory of every process over time, and its growth."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """Resident memory of a process at one time."""

    seconds: float
    process: str
    mib: float


@dataclass(frozen=True)
class Growth:
    """Median memory of a process after the warm-up and at the end of the soak."""

    process: str
    before_mib: float
    after_mib: float

    def is_within(self, share: float, mib: float) -> bool:
        """Return whether the growth is below a share of the memory, or below some MiB."""
        return self.after_mib - self.before_mib <= max(share * self.before_mib, mib)


def growths(samples: Sequence[Sample], warm_up_s: float) -> list[Growth]:
    """Return the growth of every process that lived from the warm-up to the end.

    Compares the first and the last fifth of the time after the warm-up.
    """
    end = max(sample.seconds for sample in samples)
    fifth = (end - warm_up_s) / 5
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.process].append(sample)
    result = []
    for process, some in found.items():
        first = [s.mib for s in some if warm_up_s <= s.seconds <= warm_up_s + fifth]
        last = [s.mib for s in some if s.seconds >= end - fifth]
        if first and last:
            result.append(Growth(process, _median(first), _median(last)))
    return result


def write_csv(samples: Sequence[Sample], path: Path) -> None:
    """Write one row per sample."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["seconds", "process", "rss_mib"])
        for sample in samples:
            writer.writerow([f"{sample.seconds:.1f}", sample.process, f"{sample.mib:.1f}"])


def plot(samples: Sequence[Sample], warm_up_s: float, path: Path) -> None:
    """Plot memory over time, one line per process."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 6))
    for process in dict.fromkeys(sample.process for sample in samples):
        some = [sample for sample in samples if sample.process == process]
        axes.plot([s.seconds / 60 for s in some], [s.mib for s in some], label=process)
    axes.axvline(warm_up_s / 60, linestyle="--", color="grey", label="end of the warm-up")
    axes.set(xlabel="minutes", ylabel="resident memory (MiB)", yscale="log")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
