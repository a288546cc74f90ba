"""Run the GPU checks one after the other, and write one report: see `check.sh`.

Each check is a process with a time limit of its own, and a failed one does not stop the others. All
results are in `gpu-check.json`, from which a later call goes on, also on another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.decision import decide

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".gpu-check"
REPORT = "gpu-check.json"
PINS = ROOT / "requirements" / "gpu.txt"
Results = dict[str, dict[str, Any]]
_TAIL_CHARACTERS = 4000
# Exit code while checks that were asked for have no result.
_UNFINISHED = 3
# A CPU may be slow and busy, and what is tried there is whether a check works.
_CPU_LIMITS = 5
# Left at the end of a call for the report.
_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """A check: a function of `module` by this name.

    expected_s: estimated seconds on a GPU; a check is started if so many are left. limit_s: after
    which it is ended. packages: what it imports; without one of them it is skipped. after: checks
    whose results it uses.
    """

    name: str
    expected_s: int
    limit_s: int
    shows: str
    module: str
    packages: tuple[str, ...]
    after: tuple[str, ...] = ()


_TORCH, _VLLM = "benchmarks.gpu.torch_checks", "benchmarks.gpu.vllm_checks"
_FAMILIES = "benchmarks.gpu.family_kernel"
_PLAIN = ("torch", "transformers", "pydantic")
_OFFLINE = (*_PLAIN, "accelerate", "httpx", "peft")
_ENGINE = (*_PLAIN, "vllm")
_REPLAY = (*_ENGINE, "numpy", "scipy", "matplotlib")
CHECKS = (
    Check("machine", 20, 40, "versions, memory bandwidth, matrix products", _TORCH, _PLAIN[:2]),
    Check("kernels", 30, 60, "vLLM's compiled kernels compute what torch does", _VLLM, _ENGINE),
    Check("engine", 120, 270, "an engine of 7B dimensions starts, forks and replays", _VLLM,
          _ENGINE),
    Check("vllm_default", 60, 120, "forks equal plain decoding in float32", _VLLM,
          _ENGINE),
    Check("replay", 250, 420, "forked and sequential runs at 7B dimensions, and step costs", _VLLM,
          _REPLAY, ("engine",)),
    Check("family_attention", 110, 170, "the kernel that reads shared KV blocks once", _FAMILIES,
          ("torch", "triton", "numpy")),
    Check("prefixes", 60, 120, "shared prefixes of 128 to 1,024 tokens, by each method",
          "benchmarks.gpu.prefixes", (*_ENGINE, "triton", "numpy")),
    Check("families", 190, 300, "the runs of `replay` with family attention", _VLLM, _REPLAY,
          ("replay",)),
    Check("families_f32", 60, 120, "family attention equals plain decoding in float32", _VLLM,
          _ENGINE),
    Check("bf16", 90, 180, "bf16 as users have it, without and with family attention", _VLLM,
          _ENGINE),
    Check("vllm_v1", 60, 120, "the V1 model runner gives the same texts", _VLLM,
          _ENGINE, ("vllm_default",)),
    Check("vllm_sync", 60, 120, "without async scheduling the texts are the same", _VLLM,
          _ENGINE, ("vllm_default",)),
    Check("vllm_eager", 50, 120, "without CUDA graphs the texts are the same", _VLLM,
          _ENGINE, ("vllm_default",)),
    Check("step_times", 100, 180, "step times of a 7B model, against the tables", _TORCH, _PLAIN),
    Check("triton", 110, 170, "a forked run of `replay` with vLLM's Triton attention", _VLLM,
          _REPLAY, ("replay",)),
    Check("triton_families", 220, 320, "the runs of `replay` with our Triton kernel", _VLLM,
          _REPLAY, ("replay",)),
    Check("training", 60, 110, "FlexAttention and SDPA: loss, gradients, memory", _TORCH, _OFFLINE),
    Check("fsdp", 50, 90, "a training step with sharded weights equals one without", _TORCH,
          _OFFLINE),
    Check("decoders", 60, 120, "decoders in float32 give the texts of a CPU", _TORCH, _OFFLINE),
    Check("predictions", 150, 600, "the errors of all predictions of `replay`", _VLLM, _REPLAY,
          ("machine", "replay")),
    Check("figure4", 120, 200, "Figure 4: one answer at a time at 7B dimensions", _TORCH,
          (*_OFFLINE, "matplotlib")),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks without a result; return 1 if one has failed, 3 if some are left."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/check.sh",
        description="Run the GPU checks that have no result yet, and write one report.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="checks, with the seconds that they are expected to take on a GPU:\n"
        + "\n".join(f"  {check.name:17}{check.expected_s:4}  {check.shows}" for check in CHECKS),
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu tries the checks without a GPU (default: cuda)",
    )
    parser.add_argument(
        "--size", choices=["full", "tiny"], default="full", help="tiny is for a CPU (default: full)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.5,
        help="time of this call; what does not fit waits (default: 9.5)",
    )
    parser.add_argument(
        "--only", metavar="CHECK,...", help="run these checks, and those whose results they need"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="repeat the checks of --only although they have a result",
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="TRACE",
        help="recorded answers to replay, as JSON lines (default: the embedded model's corpus)",
    )
    parser.add_argument(
        "--dimensions",
        default="apar-7b",
        metavar="MODEL",
        help="model whose dimensions are replayed, or a config.json (default: apar-7b)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=STATE,
        metavar="DIR",
        help="folder of results (default: .gpu-check)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="REPORT",
        help=f"{REPORT} of another machine with the same GPU to go on from",
    )
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, not {options.minutes:g}")
    for option in ("answers", "resume"):
        path = getattr(options, option)
        if path is not None and not path.is_file():
            parser.error(f"--{option}: no file {path}")
    names = [check.name for check in CHECKS]
    asked = names if options.only is None else [each.strip() for each in options.only.split(",")]
    try:
        wanted = with_needed(asked)
    except KeyError as error:
        parser.error(f"--only: no check {error}; there are {', '.join(names)}")
    gpu = gpu_name()
    # Results of different GPUs are never mixed.
    place = [options.device, options.size, *(re.findall(r"\w+", gpu.lower()) if gpu else ())]
    state: Path = options.state / "-".join(place)
    out = Path(os.environ.get("OUT") or ROOT / "out" / "gpu-check")
    try:
        state.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        results = read_results(state / REPORT, options, gpu)
        if options.resume is not None and not results:
            results = read_results(options.resume, options, gpu)
    except OSError as error:
        parser.error(f"cannot read or write {error.filename}: {error.strerror}")
    except ReportError as error:
        parser.error(str(error))
    deadline_s = time.monotonic() + 60 * options.minutes - _MARGIN_S
    for check in CHECKS:
        is_repeated = options.again and check.name in asked
        if check.name not in wanted or (_has_run(results, check.name) and not is_repeated):
            continue
        left_s = deadline_s - time.monotonic()
        reason = obstacle(check, results)
        if reason is not None:
            found: dict[str, Any] = {"status": "skipped", "reason": reason}
        elif left_s < check.expected_s:
            print(f"{check.name}: not in this call, {left_s:.0f} of {check.expected_s} s are left")
            continue
        else:
            print(f"{check.name}: {check.shows} ...", flush=True)
            if is_repeated:
                # What an earlier try has measured and kept.
                shutil.rmtree(state / check.name, ignore_errors=True)
                (state / f"{check.name}.data.runs.json").unlink(missing_ok=True)
            tries = results.get(check.name, {}).get("tries", 0)
            found = run_check(check, options, state, left_s)
            found |= {"gpu": gpu, "tries": tries + (found["status"] == "timed out")}
        results[check.name] = found
        print(f"{check.name}: {_outcome(found)}", flush=True)
        for line in (found.get("data") or {}).get("summary", ()):
            print(f"    {line}", flush=True)
        write_report(results, state, out, options)
    write_report(results, state, out, options)
    unfinished = [name for name in wanted if not _has_run(results, name)]
    print(f"Report: {out / 'gpu-check.md'}; without a result: {', '.join(unfinished) or 'none'}")
    if any(found["status"] in ("failed", "timed out") for found in results.values()):
        return 1
    return _UNFINISHED if unfinished else 0


def with_needed(names: Iterable[str]) -> list[str]:
    """Return checks and all that they need, in their order. Raises KeyError for an unknown one."""
    checks = {check.name: check for check in CHECKS}
    wanted: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        wanted.add(name)
        left += checks[name].after
    return [name for name in checks if name in wanted]


class ReportError(Exception):
    """A report from which this call cannot go on."""


def read_results(path: Path, options: argparse.Namespace, gpu: str | None) -> Results:
    """Return the results of a report, by name of the check; none without a file.

    Those of another GPU are left out, with a warning. A machine without a GPU takes all: some
    checks need none. Raises ReportError for another file, or a report of another device or size.
    """
    if not path.exists():
        return {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        kind = (report["device"], report["size"])
        results: Results = dict(report["checks"])
        gpus = {str(found["gpu"]) for found in results.values() if found.get("gpu")}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError(f"{path} is no {REPORT}: {type(error).__name__}: {error}") from error
    if kind != (options.device, options.size):
        raise ReportError(
            f"{path} is of --device {kind[0]} --size {kind[1]}, not --device {options.device} "
            f"--size {options.size}"
        )
    if gpu is not None and gpus - {gpu}:
        print(f"{path} is of {', '.join(sorted(gpus))}, not {gpu}: all checks run anew", flush=True)
        return {}
    return results


def _has_run(results: Results, name: str) -> bool:
    # A skipped check is tried again: what it needs may be there by now. So is one that timed out
    # once: what it has compiled is kept.
    found = results.get(name, {})
    status = found.get("status")
    return status in ("passed", "failed") or (status == "timed out" and found["tries"] > 1)


def _outcome(found: Mapping[str, Any]) -> str:
    return f"{found['status']}: {found['reason']}" if "reason" in found else str(found["status"])


def obstacle(check: Check, results: Results) -> str | None:
    """Say why a check cannot run here; None if it can."""
    missing = [name for name in check.packages if not _is_installed(name)]
    if missing:
        pins = " ".join(pinned(name) for name in missing)
        return f"missing: {Path(sys.executable).name} -m pip install {pins}"
    for name in check.after:
        status = results.get(name, {}).get("status", "without a result")
        if status != "passed":
            return f"{name} is {status}"
    return None


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def pinned(package: str) -> str:
    """Return a package with its version in requirements/gpu.txt."""
    pattern = re.compile(rf"{re.escape(package)}==[^ ]+")
    with PINS.open(encoding="utf-8") as lines:
        return next((found[0] for line in lines if (found := pattern.match(line))), package)


def gpu_name() -> str | None:
    """Return NVIDIA's name of the first GPU; None without one."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.splitlines()[0].strip()
    return None


def run_check(
    check: Check, options: argparse.Namespace, state: Path, left_s: float
) -> dict[str, Any]:
    """Run a check in a process of its own, for `left_s` at most; return its result."""
    own_limit_s = check.limit_s if options.device == "cuda" else _CPU_LIMITS * check.limit_s
    limit_s = min(own_limit_s, left_s)
    data = state / f"{check.name}.data.json"
    data.unlink(missing_ok=True)
    command = [sys.executable, "-m", check.module, check.name, "--device", options.device,
               "--size", options.size, "--data", str(data), "--work", str(state),
               "--results", str(state / REPORT), "--limit", f"{limit_s:.0f}",
               "--dimensions", options.dimensions]  # fmt: skip
    if options.answers is not None:
        command += ["--answers", str(options.answers.resolve())]
    environment = dict(os.environ)
    # Triton's attention otherwise rounds float32 to TF32, which changes tokens.
    environment.setdefault("TRITON_F32_DEFAULT", "ieee")
    if options.device == "cpu":
        # Threads of tiny matrix products wait for each other, which other work makes long.
        environment.setdefault("OMP_NUM_THREADS", "1")
    log = state / f"{check.name}.log"
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, process_group=0,
            env=environment,
        )  # fmt: skip
        try:
            status = "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            # What the end of the call cuts off is tried again.
            status = "timed out" if limit_s == own_limit_s else "cut off"
        finally:
            # Also what the check has started, such as an engine's processes.
            _end_group(process)
    tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:]
    found = {
        "status": status,
        "seconds": round(time.monotonic() - begin_s, 1),
        "command": " ".join(command[1:]),
        "data": json.loads(data.read_text(encoding="utf-8")) if data.exists() else None,
        "output": tail,
    }
    if status == "failed":
        lines = [line for line in tail.splitlines() if line.strip()]
        found["reason"] = lines[-1] if lines else f"exit code {process.returncode}"
    elif status != "passed":
        found["reason"] = f"after {limit_s:.0f} s"
    return found


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_report(results: Results, state: Path, out: Path, options: argparse.Namespace) -> None:
    """Write the results so far as JSON and Markdown, with all logs and the step costs."""
    facts = {
        "device": options.device, "size": options.size, "commit": _commit(),
        "machine": platform.platform(), "python": platform.python_version(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    text = json.dumps({**facts, "checks": results}, indent=1)
    # A call that ends here leaves a whole file.
    temporary = state / f"{REPORT}.new"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(state / REPORT)
    (out / REPORT).write_text(text, encoding="utf-8")
    (out / "gpu-check.md").write_text(_markdown(facts, results), encoding="utf-8")
    costs = (results.get("predictions", {}).get("data") or {}).get("step_costs")
    if costs is not None:
        (out / "step-costs.json").write_text(costs, encoding="utf-8")
    with tarfile.open(out / "logs.tar.xz", "w:xz") as archive:
        for log in sorted(state.glob("*.log")):
            archive.add(log, log.name)


def _commit() -> str:
    # A borrowed machine gets the files alone, and the archive of pack.sh has the commit.
    packed = ROOT / ".gpukit" / "commit"
    git = shutil.which("git")
    if git is not None:
        command = [git, "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.stdout.strip():
            return done.stdout.strip()
    return packed.read_text(encoding="utf-8").strip() if packed.exists() else "unknown"


def _markdown(facts: Mapping[str, str], results: Results) -> str:
    lines = ["# GPU checks", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| check | shows | result | seconds |", "|---|---|---|---|"]
    for check in CHECKS:
        found = results.get(check.name, {"status": "not run yet"})
        outcome = _outcome(found).replace("|", "/")
        lines.append(f"| {check.name} | {check.shows} | {outcome} | {found.get('seconds', '')} |")
    for name, found in results.items():
        data = found.get("data") or {}
        has_ended_badly = found["status"] in ("failed", "timed out", "cut off")
        if not data.get("summary") and not has_ended_badly:
            continue
        lines += ["", f"## {name}", "", *(f"- {line}" for line in data.get("summary", []))]
        if has_ended_badly:
            lines += ["", "```text", found["output"].rstrip(), "```"]
    decision = decide({name: found.get("data") or {} for name, found in results.items()
                       if found["status"] == "passed"})  # fmt: skip
    lines += ["", "## Family attention", "", f"**{decision.verdict}**", ""]
    lines += [f"- {reason}" for reason in decision.reasons]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # As an interruption, so that the check that runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
