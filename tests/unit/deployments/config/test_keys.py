"""API keys, their hashes and file; which addresses need keys; secrets are not shown."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from deployments.config import ClusterConfig, ConfigError, load_config
from deployments.config.keys import KeyConfig, hash_of, is_loopback, load_keys, new_token
from deployments.config.limits import LimitsConfig, open_storage
from deployments.config.secret import SecretReference
from tests.fakes.apar_command import apar

HASH_OF_ABC = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def key(name: str, token: str = "token", **fields: object) -> KeyConfig:
    return KeyConfig.model_validate({"name": name, "hash": hash_of(token)} | fields)


def test_the_hash_of_a_key_is_its_sha256() -> None:
    assert hash_of("abc") == HASH_OF_ABC


def test_a_new_key_is_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}

    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {len("apar-") + 43}  # 256 bits in base64


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_which_addresses_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def written(folder: Path, text: str, name: str = "serve.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_an_address_for_other_machines_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`keys` or `keys_file`.*`allow_anonymous: true`"):
        load_config(written(tmp_path, "host: 0.0.0.0"), {}, {})

    assert load_config(written(tmp_path, "host: 0.0.0.0\nallow_anonymous: true"), {}, {})
    assert load_config(written(tmp_path, "host: 0.0.0.0\nkeys_file: /run/keys"), {}, {})
    record = f"host: 0.0.0.0\nkeys: [{{name: a, hash: '{HASH_OF_ABC}'}}]"
    assert load_config(written(tmp_path, record), {}, {}).asks_for_keys
    assert not load_config(written(tmp_path, "host: localhost"), {}, {}).asks_for_keys


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("keys: [{name: a}]", r"keys\.0\.hash"),
        ("keys: [{name: a b, hash: x}]", r"keys\.0\.name"),
        ("keys: [{name: a, hash: 'sha256:12'}]", r"keys\.0\.hash: .*64 hex digits"),
        (f"keys: [{{name: a, hash: '{HASH_OF_ABC}', weight: 0}}]", r"keys\.0\.weight"),
        (f"keys: [{{name: a, hash: '{HASH_OF_ABC}', prio: 1}}]", r"keys\.0\.prio"),
        (f"keys: [{{name: a, hash: '{HASH_OF_ABC}', models: [x]}}]", r"'a' names models.*'x'"),
        (f"allow_anonymous: true\nkeys: [{{name: a, hash: '{HASH_OF_ABC}'}}]", "contradicts"),
        ("limits: {rate_storage: 'nosuch://x'}", r"limits\.rate_storage: unknown storage"),
        ("limits: {cache_secret: 0123456789abcdef}", r"cache_secret: do not write the secret"),
        ("limits: {cache_secret: {}}", r"limits\.cache_secret: give either"),
        ("limits: {cache_secret: {env: A, file: b}}", r"limits\.cache_secret: give either"),
        ("limits: {rate_storage_password: {env: A}}", "rate_storage_password: has no effect"),
        (
            "limits: {rate_storage: 'redis://u:p@host'}",
            r"limits\.rate_storage: remove the password",
        ),
        ("limits: {max_body: 5}", r"limits\.max_body"),
        ("logging: {level: LOUD}", r"logging\.level"),
        ("models: [{max_queue_s: 0}]", r"models\.0\.max_queue_s"),
    ],
)
def test_invalid_access_settings_are_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(written(tmp_path, text), {}, {})


@pytest.mark.parametrize(
    "text",
    [
        "keys: [{name: a, hash: apar-secret}]",
        "keys: [{hash: apar-secret}]",
        "keys: [apar-secret]",
        "keys: apar-secret",
        "keys: {name: a, hash: apar-secret}",
        "limits: {rate_storage: 'redis://:apar-secret@host'}",
        "limits: {rate_storage: 'no://me:apar-secret@host'}",
        "limits: {rate_storage: 'redis://host?password=apar-secret'}",
        "limits: {cache_secret: apar-secret}",
        "limits: {cache_secret: {env: apar-secret}}",
        "limits: {rate_storage_password: apar-secret}",
    ],
)
def test_a_misplaced_secret_is_not_printed(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(written(tmp_path, text), {}, {})

    assert "apar-secret" not in str(refused.value)


def test_two_hashes_of_one_name_must_have_one_set_of_limits() -> None:
    rotated = (key("a", "old", weight=2), key("a", "new", weight=2))
    assert ClusterConfig(keys=rotated).keys == rotated

    with pytest.raises(ValueError, match="'a' may differ only in their hash"):
        ClusterConfig(keys=(key("a", "old"), key("a", "new", weight=2)))
    with pytest.raises(ValueError, match="has the hash of another key"):
        ClusterConfig(keys=(key("a"), key("b")))


def test_a_keys_file_is_yaml_or_json(tmp_path: Path) -> None:
    as_yaml = written(tmp_path, f"- name: a\n  hash: {HASH_OF_ABC}\n", "keys.yaml")
    as_json = written(tmp_path, f'[{{"name": "a", "hash": "{HASH_OF_ABC}"}}]', "keys.json")

    assert load_keys(as_yaml) == load_keys(as_json) == (key("a", "abc"),)


@pytest.mark.parametrize("text", ["", "a: b", "- name: a", "- [", "- 5"])
def test_a_broken_keys_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"keys\.yaml"):
        load_keys(written(tmp_path, text, "keys.yaml"))


def test_keys_and_their_file_must_not_contradict_each_other(tmp_path: Path) -> None:
    file = written(tmp_path, f"- {{name: b, hash: '{HASH_OF_ABC}'}}", "keys.yaml")
    ClusterConfig(keys=(key("a"),), keys_file=file).check_keys_file()
    ClusterConfig().check_keys_file()

    with pytest.raises(ConfigError, match=r"keys_file: .*has the hash of another key"):
        ClusterConfig(keys=(key("a", "abc"),), keys_file=file).check_keys_file()
    with pytest.raises(ConfigError, match=r"^keys_file: .*gone"):
        ClusterConfig(keys_file=tmp_path / "gone").check_keys_file()


def test_apar_config_check_reads_the_keys_file(tmp_path: Path) -> None:
    config = written(tmp_path, f"keys_file: {tmp_path}/gone.yaml")

    result = apar("config", "check", config)

    assert result.exit_code == 1
    assert "gone.yaml" in result.output


def test_apar_keys_new_prints_the_keys_record(tmp_path: Path) -> None:
    result = apar("keys", "new", "alice")

    token = next(line for line in result.output.splitlines() if "apar-" in line).split()[-1]
    record = written(tmp_path, result.output[result.output.index("- name") :], "keys.yaml")
    assert load_keys(record) == (key("alice", token),)


def test_apar_keys_hash_takes_the_key_from_standard_input() -> None:
    result = apar("keys", "hash", "alice", stdin="abc\n")

    assert HASH_OF_ABC in result.output
    assert apar("keys", "hash", "alice", stdin="\n").exit_code == 1
    assert apar("keys", "new", "two words").exit_code == 1


def test_config_check_reads_the_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "limits: {cache_secret: {env: APAR_TEST_SECRET}}")
    checked = []
    for secret in (None, "short", "0123456789abcdef"):
        if secret is not None:
            monkeypatch.setenv("APAR_TEST_SECRET", secret)
        result = apar("config", "check", file)
        checked.append(result.exit_code)
        assert secret is None or secret not in result.output
        assert result.exit_code == 0 or "limits.cache_secret" in result.output

    assert checked == [1, 1, 0]


def test_the_password_is_added_to_the_storage_uri(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("a/b@c\n")
    limits = LimitsConfig(
        rate_storage="redis://me@host:1/2", rate_storage_password=SecretReference(file=file)
    )

    assert limits.read_storage_uri() == "redis://me:a%2Fb%40c@host:1/2"


def test_the_memory_storage_needs_no_client() -> None:
    assert type(open_storage(LimitsConfig().rate_storage)).__name__ == "MemoryStorage"


def test_a_class_for_metrics_is_a_plain_word() -> None:
    fields = {"name": "alice", "hash": HASH_OF_ABC}

    assert KeyConfig.model_validate(fields).metrics_class == "default"
    assert KeyConfig.model_validate(fields | {"metrics_class": "paying"}).metrics_class == "paying"
    with pytest.raises(ValidationError):
        KeyConfig.model_validate(fields | {"metrics_class": "two words"})
