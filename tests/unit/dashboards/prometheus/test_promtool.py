"""The committed files are current, and Prometheus' own tools accept and test them."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.prometheus import rule_groups
from dashboards.prometheus.files import FOLDER, shipped_files
from tests.fakes.tools import needs

ALERTS, RECORDING = "alerts.yml", "recording.yml"
TESTS = sorted((FOLDER / "tests").glob("*.yml"))
needs_promtool = needs("promtool")
needs_amtool = needs("amtool")


def run(*command: str | Path) -> tuple[bool, str]:
    """Run a command; return whether it succeeded, and its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def cases_of(kind: str) -> list[dict[str, Any]]:
    """All cases of one kind (`alert_rule_test`, `promql_expr_test`)."""
    return [
        case
        for path in TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test.get(kind, ())
    ]


def test_the_committed_files_are_current() -> None:
    for path, text in shipped_files().items():
        assert (FOLDER / path).read_text(encoding="utf-8") == text, path


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-single-machine.yml"])
def test_promtool_accepts_the_configuration_and_its_rules(name: str) -> None:
    right, said = run("promtool", "check", "config", FOLDER / name)

    assert right, said
    assert said.count("rules found") == 2
    num_rules = sum(len(group["rules"]) for group in rule_groups())
    found = [int(line.split()[1]) for line in said.splitlines() if "rules found" in line]
    assert sum(found) == num_rules


@needs_promtool
@pytest.mark.parametrize("broken", ["scrape_interval: 5x", "scrape_intervall: 5s"])
def test_promtool_refuses_a_broken_configuration(tmp_path: Path, broken: str) -> None:
    text = (FOLDER / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("scrape_interval: 15s", broken))

    assert not run("promtool", "check", "config", tmp_path / "prometheus.yml")[0]


@needs_amtool
def test_amtool_accepts_alertmanagers_configuration(tmp_path: Path) -> None:
    right, said = run("amtool", "check-config", FOLDER / "alertmanager.yml")
    text = (FOLDER / "alertmanager.yml").read_text()
    (tmp_path / "broken.yml").write_text(text.replace("receiver: page", "receiver: nobody"))

    assert right, said
    assert not run("amtool", "check-config", tmp_path / "broken.yml")[0]


@needs_amtool
@pytest.mark.parametrize(("severity", "receiver"), [("page", "page"), ("ticket", "ticket")])
def test_alerts_are_routed_by_severity(severity: str, receiver: str) -> None:
    right, said = run(
        "amtool",
        "config",
        "routes",
        "test",
        f"--config.file={FOLDER / 'alertmanager.yml'}",
        f"severity={severity}",
    )

    assert right, said
    assert said.splitlines()[0] == receiver


@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_tests(path: Path) -> None:
    right, said = run("promtool", "test", "rules", path)

    assert right, said


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = cases_of("alert_rule_test")
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    alerts = {
        rule["alert"] for group in rule_groups() for rule in group["rules"] if "alert" in rule
    }

    assert fires == alerts
    assert silent == alerts


def test_every_recording_rule_is_tested() -> None:
    tested = " ".join(case["expr"] for case in cases_of("promql_expr_test"))

    for group in rule_groups():
        for rule in group["rules"]:
            assert rule.get("record", "") in tested


def test_the_tests_evaluate_the_groups_in_their_order() -> None:
    names = [group["name"] for group in rule_groups()]

    for path in TESTS:
        content = yaml.safe_load(path.read_text())
        order = content["group_eval_order"]
        assert order == names[: len(order)]
        with_alerts = any("alerts.yml" in name for name in content["rule_files"])
        assert with_alerts == (len(order) == len(names))


def slow(*values: str) -> Any:
    """A case that is too slow for `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def planted(folder: Path, path: str, old: str, new: str) -> Path:
    """Copy rules and tests, and change a rule file."""
    for name in ("rules", "tests"):
        shutil.copytree(FOLDER / name, folder / name)
    target = folder / "rules" / path
    text = target.read_text()
    assert text.count(old) == 1, (old, text.count(old))
    target.write_text(text.replace(old, new))
    return folder / "tests"


@needs_promtool
@pytest.mark.parametrize(
    ("path", "old", "new", "test"),
    [
        slow(ALERTS, "apar_replicas:max == 0", "apar_replicas:max == 1", "replica_alerts"),
        (ALERTS, "_wanted:max > 0", "_wanted:max >= 0", "replica_alerts"),
        (ALERTS, "> 0\n      unless sum", "> 0\n      and sum", "replica_alerts"),
        (ALERTS, "group by (cluster, namespace) (last_over", "group (last_over", "replica_alerts"),
        slow(ALERTS, "p90_5m > 5\n", "p90_5m > 50\n", "serving_alerts"),
        slow(ALERTS, "and min_over_time", "or min_over_time", "serving_alerts"),
        (ALERTS, 'state="deferred"', 'state="waiting"', "engine_alerts"),
        slow(
            ALERTS, "errors:ratio_rate30m > 0.006", "errors:ratio_rate30m > 0.6", "objectives_long"
        ),
        slow(ALERTS, "ratio_rate5m > 0.0144", "ratio_rate1h > 0.0144", "objectives_short"),
        (RECORDING, "apar_forks_total[5m]", "apar_forks[5m]", "recording"),
        (RECORDING, "(apar_given_up_total[10m])", "(apar_given_up_total[30m])", "recording"),
        (RECORDING, "namespace, model, state)", "model, state)", "recording"),
        slow(
            RECORDING,
            "max by (cluster, namespace, model) (apar_replicas)",
            "apar_replicas",
            "recording",
        ),
    ],
)
def test_the_rule_tests_detect_a_mistake(
    tmp_path: Path, path: str, old: str, new: str, test: str
) -> None:
    tests = planted(tmp_path, path, old, new)

    right, said = run("promtool", "test", "rules", tests / f"{test}.yml")

    assert not right
    assert "FAILED" in said


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize(
    "index", range(len(rule_groups())), ids=[group["name"] for group in rule_groups()]
)
def test_the_rule_tests_detect_a_disabled_rule(tmp_path: Path, index: int) -> None:
    """Disable each rule in turn; a test file that names it must fail."""
    for name in ("rules", "tests"):
        shutil.copytree(FOLDER / name, tmp_path / name)
    group = rule_groups()[index]
    alerts = "alert" in group["rules"][0]
    target = tmp_path / "rules" / ("alerts.yml" if alerts else "recording.yml")
    whole = target.read_text()
    for rule in group["rules"]:
        name = rule["alert"] if alerts else rule["record"]
        content = yaml.safe_load(whole)
        for each in content["groups"]:
            for candidate in each["rules"]:
                if name in (candidate.get("alert"), candidate.get("record")):
                    candidate["expr"] = f"({rule['expr']}) and on () (vector(1) == 0)"
        target.write_text(yaml.safe_dump(content))
        naming = [path for path in (tmp_path / "tests").glob("*.yml") if name in path.read_text()]
        assert any(not run("promtool", "test", "rules", path)[0] for path in naming), name
