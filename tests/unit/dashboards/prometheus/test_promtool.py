"""Prometheus' own tools accept the configuration and test the rules."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config.metrics import DEFAULT_PORT
from tests.fakes.rules import ALERTS, FOLDER, RECORDS, RULES, rule_groups, shipped
from tests.fakes.tools import needs

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


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-single-machine.yml"])
def test_promtool_accepts_the_configuration_and_its_rules(name: str) -> None:
    right, said = run("promtool", "check", "config", FOLDER / name)

    assert right, said
    found = [int(line.split()[1]) for line in said.splitlines() if line.endswith("rules found")]
    assert sum(found) == len(RULES)


def test_the_configurations_scrape_the_default_port_and_name_the_cluster() -> None:
    [listed] = shipped("prometheus.yml")["scrape_configs"]
    [single] = shipped("prometheus-single-machine.yml")["scrape_configs"]

    assert listed["relabel_configs"].pop()["replacement"] == f"$1:{DEFAULT_PORT}"
    assert single["static_configs"] == [{"targets": [f"127.0.0.1:{DEFAULT_PORT}"]}]
    assert listed["relabel_configs"] == single["relabel_configs"]
    labels = {each["target_label"]: each["replacement"] for each in single["relabel_configs"]}
    assert labels == {"job": "apar", "cluster": "default", "namespace": "default"}


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

    assert fires == ALERTS.keys()
    assert silent == ALERTS.keys()


def test_every_recording_rule_is_tested() -> None:
    tested = " ".join(case["expr"] for case in cases_of("promql_expr_test"))

    assert {record for record in RECORDS if record not in tested} == set()


def test_the_tests_evaluate_records_before_alerts() -> None:
    alerting = {group["name"]: "alert" in group["rules"][0] for group in rule_groups()}

    for path in TESTS:
        order = yaml.safe_load(path.read_text())["group_eval_order"]
        assert set(order) == alerting.keys()
        assert order == sorted(order, key=alerting.__getitem__)


def planted(folder: Path, old: str, new: str) -> Path:
    """Copy rules and tests, change the rules in one place, and return the folder of the tests."""
    for name in ("rules", "tests"):
        shutil.copytree(FOLDER / name, folder / name)
    [target] = [path for path in (folder / "rules").iterdir() if old in path.read_text()]
    text = target.read_text()
    assert text.count(old) == 1, (old, text.count(old))
    target.write_text(text.replace(old, new))
    return folder / "tests"


def slow(*values: str) -> Any:
    """A case that is too slow for `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@needs_promtool
@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        slow("replicas:max == 0", "replicas:max == 1", "replica_alerts"),
        ("_wanted:max > 0\n    for: 1m", "_wanted:max >= 0\n    for: 1m", "replica_alerts"),
        ("> 0\n      unless sum", "> 0\n      and sum", "replica_alerts"),
        ("(group by (cluster, namespace)", "(group", "replica_alerts"),
        slow("p90_5m > 5\n", "p90_5m > 50\n", "serving_alerts"),
        slow("and min_over_time", "or min_over_time", "serving_alerts"),
        ('state="deferred"', 'state="waiting"', "engine_alerts"),
        slow("errors:ratio_rate30m > 6", "errors:ratio_rate30m > 600", "objectives_long"),
        slow("errors:ratio_rate5m > 14.4", "errors:ratio_rate1h > 14.4", "objectives_short"),
        ("apar_forks_total[5m]", "apar_forks[5m]", "recording"),
        ("(apar_given_up_total[10m])", "(apar_given_up_total[30m])", "recording"),
        ("namespace, model, state)", "model, state)", "recording"),
        slow("max by (cluster, namespace, model) (apar_replicas)", "apar_replicas", "recording"),
    ],
)
def test_the_rule_tests_detect_a_mistake(tmp_path: Path, old: str, new: str, test: str) -> None:
    tests = planted(tmp_path, old, new)

    right, said = run("promtool", "test", "rules", tests / f"{test}.yml")

    assert not right
    assert "FAILED" in said


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("group", rule_groups(), ids=lambda group: group["name"])
def test_the_rule_tests_detect_a_disabled_rule(tmp_path: Path, group: dict[str, Any]) -> None:
    """Disable each rule in turn; a test file that names it must fail."""
    shutil.copytree(FOLDER / "tests", tmp_path / "tests")
    target = tmp_path / "rules" / "all.yml"
    target.parent.mkdir()
    for rule in group["rules"]:
        name = rule.get("alert") or rule["record"]
        groups = rule_groups()
        [disabled] = [each for other in groups for each in other["rules"] if each == rule]
        disabled["expr"] = f"({rule['expr']}) and on () (vector(1) == 0)"
        target.write_text(yaml.safe_dump({"groups": groups}))
        naming = [path for path in (tmp_path / "tests").glob("*.yml") if name in path.read_text()]
        assert any(not run("promtool", "test", "rules", path)[0] for path in naming), name
