from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from apar_core.engine.checkpoint import CheckpointReport
from cluster.cli.doctor import check_checkpoint, describe
from cluster.cli.main import app
from cluster.diagnosis import Finding


def test_the_embedded_model_is_an_apar_checkpoint() -> None:
    findings = {finding.name: finding for finding in check_checkpoint("apar-tiny")}

    assert findings["forks"].value.startswith("yes, an APAR checkpoint: [Fork] ")
    assert findings["architecture"].value == "LlamaForCausalLM (llama, bfloat16)"
    assert [finding for finding in findings.values() if finding.problem] == []


def test_a_folder_without_a_checkpoint_is_a_problem(tmp_path: Path) -> None:
    [finding] = check_checkpoint(str(tmp_path))

    assert finding.value == str(tmp_path)
    assert finding.problem is not None
    assert finding.problem.startswith(f"no model configuration in '{tmp_path}'")


def test_the_command_exits_with_1_if_something_is_wrong(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path)], env={"COLUMNS": "200"})

    assert result.exit_code == 1
    assert "no model configuration" in result.output
    assert "vLLM plugin" in result.output


def test_an_ordinary_model_is_no_problem() -> None:
    report = CheckpointReport(
        name_or_path="some/model",
        architecture="LlamaForCausalLM",
        model_type="llama",
        dtype="float16",
        num_parameters=None,
        weights_bytes=None,
        max_positions=4096,
        vocabulary_size=32000,
        num_embeddings=32000,
        control_tokens=None,
        spellings={},
    )

    findings = describe(report)

    assert Finding("weights", "not on this machine") in findings
    assert Finding("parameters", "unknown") in findings
    assert findings[-1] == Finding("forks", "no: an ordinary model, served without forking")
