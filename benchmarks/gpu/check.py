"""Run the GPU checks one after the other, and write one report: see `check.sh`.

Each check is a process with a time limit of its own, and a failed one does not stop the others. A
check's result is kept in a folder, so a later call starts with the first check that has none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".gpu-check"
PACKAGES = (
    "torch", "transformers", "pydantic", "accelerate", "httpx", "ijson", "matplotlib", "peft",
)  # fmt: skip
"""What the checks without vLLM import."""
_TAIL_CHARACTERS = 4000
# Left at the end of a call for the report.
_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """A check: a function of `module` by this name, and the seconds that it may take.

    needs: module without which it is skipped. packages: what it imports.
    """

    name: str
    limit_s: int
    shows: str
    module: str = "benchmarks.gpu.torch_checks"
    needs: str = "torch"
    packages: tuple[str, ...] = PACKAGES


_VLLM = "benchmarks.gpu.vllm_checks"
CHECKS = (
    Check("machine", 40, "versions, device, memory bandwidth and matrix products"),
    Check("step_times", 180, "step costs on a grid, against the tables of predictions"),
    Check(
        "family_attention", 170, "the kernel that reads shared KV blocks once: errors and times",
        "benchmarks.gpu.family_kernel", "triton", ("torch", "numpy"),
    ),
    Check("decoders", 140, "decoders in float32 give the same texts as on the CPU"),
    Check("figure4", 200, "Figure 4: one answer at a time at 7B dimensions, by replay"),
    Check("vllm_default", 140, "an engine starts; forks equal plain decoding", _VLLM, "vllm"),
    Check("vllm_v1", 80, "the V1 model runner gives the same texts", _VLLM, "vllm"),
    Check("vllm_sync", 80, "without async scheduling the texts are the same", _VLLM, "vllm"),
    Check("vllm_eager", 80, "without CUDA graphs the texts are the same", _VLLM, "vllm"),
    Check("training", 110, "FlexAttention and SDPA: loss, gradients, time, memory"),
    Check("fsdp", 90, "a training step with sharded weights equals one without"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks without a result; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--minutes", type=float, default=9.5, help="time of this call")
    parser.add_argument("--only", help="names of checks, separated by commas")
    parser.add_argument("--again", action="store_true", help="also run checks with a result")
    parser.add_argument("--answers", type=Path, help="trace of answers to replay for figure4")
    parser.add_argument("--state", type=Path, default=STATE, help="folder for results")
    options = parser.parse_args(arguments)
    names = [check.name for check in CHECKS]
    wanted = names if options.only is None else options.only.split(",")
    if unknown := sorted({*wanted} - {*names}):
        parser.error(f"--only: no check {', '.join(unknown)}; there are {', '.join(names)}")
    imported = dict.fromkeys(
        name for check in CHECKS if check.name in wanted for name in check.packages
    )
    if missing := [name for name in imported if not _is_installed(name)]:
        parser.error(f"missing: {sys.executable} -m pip install {' '.join(missing)}")
    state: Path = options.state / f"{options.device}-{options.size}"
    state.mkdir(parents=True, exist_ok=True)
    out = Path(os.environ.get("OUT") or ROOT / "out" / "gpu-check")
    out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + 60 * options.minutes - _MARGIN_S
    for check in CHECKS:
        path = state / f"{check.name}.json"
        if check.name not in wanted or (_has_run(path) and not options.again):
            continue
        left_s = deadline_s - time.monotonic()
        if not _is_installed(check.needs):
            reason = f"{check.needs} is not installed"
            found: dict[str, Any] = {"status": "skipped", "reason": reason}
        elif left_s < check.limit_s:
            print(f"{check.name}: not in this call, {left_s:.0f} of {check.limit_s} s are left")
            continue
        else:
            print(f"{check.name}: {check.shows} ...", flush=True)
            found = run_check(check, options, state)
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{check.name}: {_outcome(found)}", flush=True)
        write_report(state, out, options)
    results = write_report(state, out, options)
    print(f"Report: {out / 'gpu-check.md'}")
    return int(any(each["status"] in ("failed", "timed out") for each in results.values()))


def _has_run(path: Path) -> bool:
    # A skipped check is tried again: what it needs may be there by now.
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] != "skipped"


def _outcome(found: dict[str, Any]) -> str:
    return f"{found['status']}: {found['reason']}" if "reason" in found else str(found["status"])


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def run_check(check: Check, options: argparse.Namespace, state: Path) -> dict[str, Any]:
    """Run a check in a process of its own; return its result."""
    data = state / f"{check.name}.data.json"
    data.unlink(missing_ok=True)
    command = [sys.executable, "-m", check.module, check.name, "--device", options.device,
               "--size", options.size, "--data", str(data), "--work", str(state),
               "--limit", str(check.limit_s)]  # fmt: skip
    if options.answers is not None:
        command += ["--answers", str(options.answers.resolve())]
    log = state / f"{check.name}.log"
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "passed" if process.wait(check.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
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
    elif status == "timed out":
        found["reason"] = f"after {check.limit_s} s"
    return found


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_report(state: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the results so far as Markdown and JSON; return them by name of the check."""
    results = {
        check.name: json.loads(path.read_text(encoding="utf-8"))
        for check in CHECKS
        if (path := state / f"{check.name}.json").exists()
    }
    commit = _commit()
    facts = {
        "device": options.device, "size": options.size, "commit": commit,
        "machine": platform.platform(), "python": platform.python_version(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    text = json.dumps({**facts, "checks": results}, indent=1)
    (out / "gpu-check.json").write_text(text, encoding="utf-8")
    (out / "gpu-check.md").write_text(_markdown(facts, results), encoding="utf-8")
    return results


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _markdown(facts: dict[str, str], results: dict[str, Any]) -> str:
    lines = ["# GPU checks", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| check | shows | result | seconds |", "|---|---|---|---|"]
    for check in CHECKS:
        found = results.get(check.name, {"status": "not run yet"})
        outcome = _outcome(found).replace("|", "/")
        seconds = found.get("seconds", "")
        lines.append(f"| {check.name} | {check.shows} | {outcome} | {seconds} |")
    for name, found in results.items():
        data = found.get("data") or {}
        if not data.get("summary") and found["status"] not in ("failed", "timed out"):
            continue
        lines += ["", f"## {name}", "", *(f"- {line}" for line in data.get("summary", []))]
        if found["status"] in ("failed", "timed out"):
            lines += ["", "```text", found["output"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
