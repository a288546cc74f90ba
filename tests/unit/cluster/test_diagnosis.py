from cluster.diagnosis import (
    TESTED_VERSIONS,
    Finding,
    check_cuda_only_packages,
    check_memory,
    check_plugin,
    check_versions,
    diagnose,
    installed_versions,
)

GIB = 2**30


def test_tested_versions_raise_no_problem_and_builds_of_them_neither() -> None:
    findings = check_versions({**TESTED_VERSIONS, "torch": "2.13.0+cpu"})

    assert [finding.problem for finding in findings] == [None] * 4
    assert Finding("torch", "2.13.0+cpu") in findings


def test_other_and_missing_versions_are_problems_that_name_the_tested_one() -> None:
    findings = {f.name: f for f in check_versions({"vllm": "0.31.0", "ray": "2.60.0"})}

    assert findings["vllm"].value == "0.31.0"
    assert findings["vllm"].problem == "tested with 0.32.0: make venv"
    assert findings["ray"].problem is None
    assert findings["torch"] == Finding(
        "torch", "missing", "not installed; 2.13.0 is needed: make venv"
    )


def test_cuda_builds_beside_a_cpu_torch_are_problems() -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}

    findings = check_cuda_only_packages(versions)

    assert [finding.name for finding in findings] == ["torchvision"]
    assert findings[0].problem is not None
    assert check_cuda_only_packages({**versions, "torch": "2.13.0"}) == []


def test_too_little_memory_is_a_problem() -> None:
    assert check_memory(4 * GIB, 8 * GIB) == Finding("memory", "4.0 GiB available of 8.0")
    assert check_memory(3 * GIB, 8 * GIB).problem == (
        "less than the 4 GiB that `apar serve` may take"
    )


def test_this_environment_has_the_tested_versions_and_the_plugin() -> None:
    versions = installed_versions()

    assert all(finding.problem is None for finding in check_versions(versions))
    assert check_plugin() == Finding("vLLM plugin", "apar_core.engine.plugin:register")
    names = [finding.name for finding in diagnose()]
    assert names[:2] == ["python", "vllm"]
    assert {"cpu", "memory", "gpu"} <= set(names)
