"""A `user_config` written by a person, applied to a running gateway."""

from pathlib import Path
from typing import Any

import pytest

from deployments.app.ingress import IngressSettings
from deployments.config import ConfigError
from deployments.config.keys import KeyConfig, hash_of
from deployments.config.limits import LimitsConfig
from deployments.config.logging import LoggingConfig
from deployments.config.routing import RoutingPolicy, RoutingSettings
from deployments.gateway.settings import GatewaySettings, in_place_settings
from tests.fakes.bare_ingress import BareIngress

ALICE = KeyConfig(name="alice", hash=hash_of("a"))
BOB = {"name": "bob", "hash": hash_of("b"), "weight": 2.0}


def settings(**changes: Any) -> GatewaySettings:
    return GatewaySettings(
        models=(), keys=(ALICE,), limits=LimitsConfig(max_prompt_chars=5)
    ).model_copy(update=changes)


def test_given_settings_replace_the_deployed_ones_and_the_rest_stays() -> None:
    changes = {
        "keys": [BOB],
        "retries": {"max_retries": 1},
        "logging": {"level": "DEBUG"},
        "limits": {"max_body_bytes": 9},
    }

    changed = in_place_settings(changes).over(settings())
    untouched = in_place_settings({"routing": {"policy": "random"}}).over(settings())

    assert changed.keys == (KeyConfig(**BOB),)
    assert changed.retries.max_retries == 1
    assert changed.logging.level == "DEBUG"
    assert changed.limits == LimitsConfig(max_body_bytes=9)
    assert untouched == settings()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": []}, "user_config: models: Extra inputs"),
        ({"routing": {"policy": "best"}}, "user_config: routing.policy"),
        ({"keys": [BOB, BOB]}, "user_config: .*hash of another key"),
        ({"keys": [{"name": "x", "hash": "apar-secret"}]}, r"keys\.0\.hash: [^(]*$"),
    ],
)
def test_errors_name_the_invalid_field_and_no_secret(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        in_place_settings(changes)


def test_no_change_opens_a_gateway_that_requires_keys() -> None:
    no_keys = in_place_settings({"keys": []})

    with pytest.raises(ConfigError, match="everyone could call"):
        no_keys.over(settings())
    assert no_keys.over(settings(keys_file=Path("keys.yaml"))).keys == ()


async def test_invalid_settings_stop_a_starting_gateway_but_not_a_running_one(
    tmp_path: Path,
) -> None:
    gateway = settings(metrics=False, logging=LoggingConfig(folder=tmp_path))
    built = IngressSettings(
        gateway=gateway, deployments=(), routing=RoutingSettings(policy=RoutingPolicy.RANDOM)
    )
    ingress = BareIngress(built)

    with pytest.raises(ConfigError, match="limts"):
        await ingress.reconfigure({"limts": {}})
    await ingress.reconfigure({"limits": {"max_prompt_chars": 7}})
    taken = ingress._settings
    await ingress.reconfigure({"limts": {}})

    assert taken.gateway.limits.max_prompt_chars == 7
    assert taken.routing.policy is RoutingPolicy.RANDOM
    assert ingress._settings is taken
    # Without the limits they are again what was built.
    await ingress.reconfigure({"retries": {"max_retries": 0}})
    assert ingress._settings.gateway.limits.max_prompt_chars == 5
