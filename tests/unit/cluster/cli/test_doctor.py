"""`apar doctor`: packages, machine and checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from apar_core.engine.checkpoint import CheckpointReport
from apar_core.formats.resolved_format import find_format, resolve
from cluster.cli.doctor import (
    Finding,
    check_checkpoint,
    check_cuda_only_packages,
    check_device,
    check_memory,
    check_plugin,
    check_rows,
    check_versions,
    describe,
    diagnose,
    hub_problem,
    installed_versions,
)
from deployments.config.model import PRESETS
from tests.fakes.apar_command import apar
from tests.fakes.small_tokenizers import byte_level_tokenizer

GIB = 2**30
WITHOUT_FORKS = "no: an ordinary model, served without forks unless it has `parallel_format: lists`"


def test_the_embedded_model_is_an_apar_checkpoint() -> None:
    findings = {finding.name: finding for finding in check_checkpoint("apar-tiny")}

    assert findings["forks"].value.startswith("yes, an APAR checkpoint: [Fork] ")
    assert findings["architecture"].value == "LlamaForCausalLM (llama, bfloat16)"
    assert [finding for finding in findings.values() if finding.problem] == []


def test_a_folder_without_a_checkpoint_is_a_problem(tmp_path: Path) -> None:
    [finding] = check_checkpoint(str(tmp_path))

    assert finding.value == str(tmp_path)
    assert finding.problem == (f"checkpoint: {tmp_path} is no checkpoint: it has no config.json")


def test_the_command_exits_with_1_if_something_is_wrong(tmp_path: Path) -> None:
    result = apar("doctor", "--model", tmp_path)

    assert result.exit_code == 1
    assert "is no checkpoint" in " ".join(result.output.split())
    assert "vLLM plugin" in result.output


def test_without_a_network_doctor_says_at_once_what_it_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A port on which nobody listens.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    [finding] = check_checkpoint("some-owner/some-model")

    assert "http://127.0.0.1:1 does not answer: " in str(finding.problem)
    assert "so it was not checked" in str(finding.problem)
    assert "Connecting to http://127.0.0.1:1 (at most 10 s)" in capsys.readouterr().err


def test_without_a_network_doctor_reads_what_was_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.cli.doctor.hub_problem", lambda: "no network")
    monkeypatch.setattr(
        "cluster.cli.doctor.local_snapshot", lambda name: Path(PRESETS["apar-tiny"].path)
    )

    hub, checkpoint, *rest = check_checkpoint("some-owner/some-model")

    assert hub == Finding("hub", "no network; only the files on this machine are checked")
    assert checkpoint.problem is None
    assert rest


ORDINARY = CheckpointReport(
    name_or_path="some/model",
    architecture="LlamaForCausalLM",
    model_type="llama",
    dtype="float16",
    num_parameters=None,
    weights_bytes=None,
    max_positions=4096,
    vocabulary_size=32000,
    num_embeddings=32000,
    found=None,
    resolved=None,
    refused=None,
)


def test_an_ordinary_model_is_no_problem() -> None:
    findings = describe(ORDINARY)

    assert Finding("weights", "not on this machine") in findings
    assert Finding("parameters", "unknown") in findings
    assert findings[-1] == Finding("forks", WITHOUT_FORKS)


def test_a_refused_format_is_named_with_the_reason() -> None:
    findings = describe(replace(ORDINARY, refused="multiverse"))

    assert findings[-2].value.startswith("multiverse, which is not served: it continues after")
    assert findings[-1].value == WITHOUT_FORKS


def test_a_checkpoint_shows_its_format_and_how_it_was_found() -> None:
    tokens = ("<FORK>", "<CHILD>")
    tokenizer = byte_level_tokenizer(tokens)
    found = find_format(tokenizer.get_vocab())
    assert found is not None
    report = replace(ORDINARY, found=found, resolved=resolve(found.definition, tokenizer))

    *_, shown, forks = describe(report)

    assert shown.value == "hpd-parsing, by its tokens (tier 1: the parent continues)"
    fork_id, child_id = (tokenizer.get_vocab()[text] for text in tokens)
    assert forks.value == f"yes, hpd-parsing: <FORK> {fork_id}, <CHILD> {child_id}"


def test_any_model_forks_at_its_lists() -> None:
    *_, shown, forks = check_checkpoint("apar-tiny", "lists")

    assert shown.value == "lists, by its configuration"
    assert forks.value == "yes: at the items of lists, without trained tokens"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("npr", "'npr' cannot be served: it continues after the stitched keys"),
        ("none", "unknown format 'none'"),
        ("hpd-parsing", "format 'hpd-parsing' needs '<FORK>' as one token"),
    ],
)
def test_a_named_format_that_cannot_be_is_a_problem(name: str, problem: str) -> None:
    *_, finding = check_checkpoint("apar-tiny", name)

    assert (finding.problem or "").startswith(problem)


def test_a_format_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{like: apar, name: mine}")

    *_, shown, forks = check_checkpoint("apar-tiny", str(file))

    assert shown.value.startswith("mine, by its configuration (tier 1: the parent continues)")
    assert forks.value.startswith("yes, mine: [Fork] ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "{like: apar, triger: x}",
            "triger: Extra inputs are not permitted; did you mean trigger?",
        ),
        ("{like: threadweaver, join: {heder: x}}", "did you mean header?"),
        ("{like: appar}", "unknown format 'appar'; known: apar, "),
        ("{name: mine}", "parent: Field required"),
        ("{like: hpd-parsing, name: mine}", "format 'mine' needs '<FORK>' as one token"),
        ("{like: ", "mine.yaml: "),
        ("- apar", "Input should be a valid dictionary"),
    ],
)
def test_a_wrong_file_of_a_format_is_a_problem(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)

    result = apar("doctor", "--parallel-format", file)

    assert result.exit_code == 1
    assert problem in " ".join(result.output.split())


def test_a_missing_file_of_a_format_is_a_problem() -> None:
    *_, finding = check_checkpoint("apar-tiny", "/nowhere/mine.yaml")

    assert "/nowhere/mine.yaml: " in (finding.problem or "")
    assert "No such file" in (finding.problem or "")


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.1", "0.33.0+cpu"])
def test_supported_versions_and_their_builds_are_no_problem(vllm: str) -> None:
    versions = {"vllm": vllm, "ray": "2.60.0", "torch": "2.14.0", "transformers": "5.20.0"}

    findings = check_versions(versions)

    assert [finding.problem for finding in findings] == [None] * 4
    assert Finding("vllm", vllm) in findings


def test_other_and_missing_versions_are_problems_that_say_what_to_do() -> None:
    findings = {f.name: f for f in check_versions({"vllm": "0.31.0", "ray": "2.59.0"})}

    assert findings["vllm"].value == "0.31.0"
    assert "checked with vLLM 0.32 and 0.33" in (findings["vllm"].problem or "")
    assert "Ray 2.60.0" in (findings["ray"].problem or "")
    assert findings["torch"].value == "missing"
    assert "make venv" in (findings["torch"].problem or "")


def test_an_environment_without_ray_is_no_problem_and_told_the_extra() -> None:
    findings = {finding.name: finding for finding in check_versions({"vllm": "0.32.0"})}

    assert findings["ray"].problem is None
    assert "pip install '.[serve]'" in findings["ray"].value


@pytest.mark.parametrize(
    ("torch", "has_driver", "advice"),
    [
        ("2.13.0+cpu", False, None),
        ("2.13.0", True, None),
        ("2.13.0+cpu", True, "make serve DEVICE=gpu"),
        ("2.13.0", False, "make serve DEVICE=cpu"),
    ],
)
def test_the_build_of_torch_must_fit_the_machine(
    torch: str, has_driver: bool, advice: str | None
) -> None:
    (finding,) = check_device({"torch": torch}, has_driver=has_driver)

    assert (finding.problem is None) == (advice is None)
    assert advice is None or advice in (finding.problem or "")


def test_cuda_builds_beside_a_cpu_torch_are_problems() -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}

    findings = check_cuda_only_packages(versions)

    assert [finding.name for finding in findings] == ["torchvision"]
    assert findings[0].problem is not None
    assert check_cuda_only_packages({**versions, "torch": "2.13.0"}) == []


def test_too_little_memory_is_a_problem() -> None:
    assert check_memory(4 * GIB, 8 * GIB) == Finding("memory", "4.0 GiB available of 8.0")
    assert check_memory(3 * GIB, 8 * GIB).problem == "`apar serve` needs up to 4 GiB"


def test_this_environment_has_the_tested_versions_and_the_plugin() -> None:
    versions = installed_versions()

    assert all(finding.problem is None for finding in check_versions(versions))
    assert check_plugin() == Finding("vLLM plugin", "apar_core.engine.plugin:register")
    names = [finding.name for finding in diagnose()]
    assert names[:2] == ["python", "vllm"]
    assert {"cpu", "memory", "gpu"} <= set(names)


def test_a_gpu_shows_its_rows_and_its_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    findings = {finding.name: finding for finding in diagnose()}

    assert findings["gpu"].value == "NVIDIA H200, 143771 MiB"
    # FlashInfer is not part of the CPU environment.
    assert findings["sampler"].value == "vLLM's own: flashinfer-python is not installed"
    assert "up to 1024" in findings["rows"].value
    assert "512 of them as a CUDA graph" in findings["rows"].value
    [small] = check_rows("NVIDIA A100-SXM4-80GB, 81920 MiB")
    assert "up to 256" in small.value
    assert "CUDA" not in small.value
    assert check_rows("unknown") == []


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "foo://x"])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("ALL_PROXY", proxy)

    assert "proxy" in str(hub_problem())
