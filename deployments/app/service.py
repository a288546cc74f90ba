"""The running application: start, rollout without lost requests, drain, shutdown."""

import io
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import ray
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from apar_core.errors import CheckpointError
from deployments.app.application import ClusterFacts, build_application
from deployments.app.gateway_group import end_shared_state
from deployments.app.ingress import APPLICATION, GATEWAY
from deployments.config import ClusterConfig, ConfigError, SecretError, StartError
from deployments.config.model import ModelConfig
from deployments.serve_flags import LOOPBACK

logger = logging.getLogger(__name__)

_QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")
_GATEWAY_ANSWER_S = 5.0
_POLL_S = 0.1
# Time for cut requests to send their errors.
_LAST_WORDS_S = 0.5
# Settings that only a restart can change.
_FIXED = ("host", "port", "ray_address", "metrics", "tls", "connections")
# Settings of a model that change without a restart of its processes.
_WITHOUT_RESTART = {"replicas", "autoscaling", "max_queued_requests", "max_queue_s"}


class Service:
    """Our application on the connected Ray cluster."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._facts = ClusterFacts(
            on_gpu=ray.cluster_resources().get("GPU", 0) > 0,
            num_replicas=config.num_replicas,
            core_shares=core_shares(config, {}, None),
            drain_s=config.drain_s,
        )

    @property
    def url(self) -> str:
        """Base URL, as reachable from this machine."""
        host = self.config.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        scheme = "http" if self.config.tls.certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.config.port}"

    def start(self) -> None:
        """Start gateway and replicas; raises StartError if a replica cannot start."""
        self._deploy(self.config, self.config)

    def rollout(self, new: ClusterConfig) -> list[str]:
        """Apply a new configuration to the running application; return the changes in words.

        No request is lost. Replicas are replaced one by one, each new one before the old where
        there is room, and the old ones finish their requests. Raises ConfigError for settings that
        need a restart, and StartError if new replicas cannot start; the old configuration is then
        served.
        """
        old, facts = self.config, self._facts
        check_change(old, new)
        self._facts = replace(
            facts,
            num_replicas=new.num_replicas,
            core_shares=core_shares(new, facts.core_shares, old),
            has_room=_has_room(new, on_gpu=facts.on_gpu),
            drain_s=new.drain_s,
        )
        try:
            for step in steps(old, new):
                self._deploy(step.replicas, step.served)
        except StartError as error:
            self._facts = facts
            self._deploy(old, old)
            raise StartError(f"{error}\nThe old configuration is served.") from error
        self.config = new
        return changes(old, new)

    def drain(self) -> int:
        """Refuse new requests and give running ones `drain_s` to finish; return how many were cut.

        A signal may raise in here at any time.
        """
        deadline = time.monotonic() + self.config.drain_s
        gateway = _gateway_handle()
        _call_gateways(gateway, "close")
        while (inside := _call_gateways(gateway, "inside")) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if inside:
            inside = _call_gateways(gateway, "cut")
            time.sleep(_LAST_WORDS_S)
        return inside

    def end(self) -> None:
        """Shut down Ray Serve on a private cluster; on another, delete only our application."""
        if self.config.ray_address is None:
            # Ray prints failed calls of the controller when they end together with it.
            with redirect_stdout(io.StringIO()):
                serve.shutdown()
        else:
            serve.delete(APPLICATION)
            end_shared_state()

    def _deploy(self, replicas: ClusterConfig, served: ClusterConfig) -> None:
        application = build_application(replicas, self._facts, served=served)
        try:
            serve.run(application, name=APPLICATION, route_prefix="/", logging_config=_QUIET)
        except RuntimeError as error:
            raise StartError(_reason(error)) from error


@contextmanager
def running_service(config: ClusterConfig) -> Iterator[Service]:
    """Run the application; raises StartError if Ray Serve or a replica cannot start."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=HTTPOptions(host=_bound_host(config), port=config.port),
            logging_config=_QUIET,
        )
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        serve.shutdown()
        raise StartError(f"Ray Serve could not start: {cause}") from error
    service = Service(config)
    try:
        service.start()
        yield service
    finally:
        service.end()


def _bound_host(config: ClusterConfig) -> str:
    """Return the address of Ray Serve's own ports, and of HAProxy unless `local_ray` moves it.

    They answer plain HTTP, without the limits of HAProxy: on a private cluster, only HAProxy, which
    is on the same machine, may reach them.
    """
    return LOOPBACK if config.ray_address is None else config.host


@contextmanager
def running(config: ClusterConfig) -> Iterator[str]:
    """Run the application; yields its base URL."""
    with running_service(config) as service:
        yield service.url


@dataclass(frozen=True, slots=True)
class Step:
    """One deployment of a rollout: the models that have replicas, and those that are offered."""

    replicas: ClusterConfig
    served: ClusterConfig


def check_change(old: ClusterConfig, new: ClusterConfig) -> None:
    """Raise ConfigError if the new configuration needs a restart."""
    for name in _FIXED:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise ConfigError(
                f"{name}: cannot be changed from {before!r} to {after!r} while serving; "
                "restart `apar serve`"
            )


def steps(old: ClusterConfig, new: ClusterConfig) -> Iterator[Step]:
    """Yield the deployments of a rollout in order; none if nothing has changed.

    First the replicas of added models start beside those of removed ones. Then the gateway offers
    the new models. Last, the removed models lose their replicas.
    """
    wanted = {model.deployment_name: model for model in new.models}
    known = {model.deployment_name for model in old.models}
    both = (
        *(wanted.get(model.deployment_name, model) for model in old.models),
        *(model for model in new.models if model.deployment_name not in known),
    )
    removes = bool(known - set(wanted))
    if both != old.models:
        yield Step(old.model_copy(update={"models": both}), old)
    if new != old:
        yield Step(new.model_copy(update={"models": both}) if removes else new, new)
    if removes:
        yield Step(new, new)


def changes(old: ClusterConfig, new: ClusterConfig) -> list[str]:
    """Describe a rollout."""
    before = {model.public_name: model for model in old.models}
    after = {model.public_name: model for model in new.models}
    said = [f"model {name} is added" for name in after if name not in before]
    said += [f"model {name} is removed" for name in before if name not in after]
    said += [
        f"model {name} is changed: {', '.join(_changed_fields(before[name], model))}"
        for name, model in after.items()
        if name in before and before[name] != model
    ]
    rest = [name for name in _changed_fields(old, new) if name not in ("models", "restart_id")]
    said += [f"{name} is changed" for name in rest]
    if old.restart_id != new.restart_id:
        said.append("all gateways and replicas are restarted")
    return said


def _changed_fields(old: BaseModel, new: BaseModel) -> list[str]:
    return [name for name in type(old).model_fields if getattr(old, name) != getattr(new, name)]


def core_shares(
    new: ClusterConfig, before: Mapping[str, int], old: ClusterConfig | None
) -> dict[str, int]:
    """Return, per deployment, the number of replicas that share the cores with its own.

    A model whose processes need not change keeps its number: a new number would restart them.
    """
    known = [] if old is None else [_process_settings(model) for model in old.models]
    return {
        model.deployment_name: before[model.deployment_name]
        if _process_settings(model) in known
        else new.num_replicas
        for model in new.models
    }


def _process_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that running replicas of a model depend on."""
    settings = model.model_dump(exclude=_WITHOUT_RESTART)
    return settings | {"name": model.public_name}


def _has_room(config: ClusterConfig, *, on_gpu: bool) -> bool:
    """Return whether there are free GPUs for one more replica of any model."""
    if not on_gpu:
        return True
    free = ray.available_resources().get("GPU", 0)
    return all(free >= model.gpus_in_ray for model in config.models)


def _gateway_handle() -> DeploymentHandle[Any]:
    gateway: DeploymentHandle[Any] = serve.get_deployment_handle(GATEWAY, APPLICATION)
    # There is no running event loop, so the handle needs its own.
    gateway._init(_run_router_in_separate_loop=True)
    # A broadcast reaches only replicas that the handle knows; an ordinary call makes them known.
    with _errors_logged():
        gateway.options(method_name="inside").remote().result(timeout_s=_GATEWAY_ANSWER_S)
    return gateway


def _call_gateways(gateway: DeploymentHandle[Any], method: str) -> int:
    """Call a method of all gateways and return the sum of the answers; 0 if they fail."""
    with _errors_logged():
        answers = gateway.broadcast(method).results(timeout_s=_GATEWAY_ANSWER_S)
        return sum(answer or 0 for answer in answers)
    return 0


@contextmanager
def _errors_logged() -> Iterator[None]:
    """Log a gateway that does not answer, so that the shutdown continues."""
    try:
        yield
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("the gateway does not answer", exc_info=error)


def _reason(error: RuntimeError) -> str:
    """Return why the application did not start; the controller knows more than the exception."""
    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return last_error(str(error))
    messages = [item.message for item in application.deployments.values() if item.message]
    # The application's own message only counts the deployments.
    return "\n".join(map(last_error, messages)) or last_error(application.message or str(error))


# As in the last line of a traceback: the name of a class, at the start of the line.
_RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception)): (?=\S)", re.MULTILINE)


def last_error(message: str) -> str:
    """Return the last exception of the traceback in a message, without the traceback.

    Exceptions of this project are returned without the name of their class, others with it. The
    whole message is logged.
    """
    if not (found := list(_RAISED.finditer(message))):
        return message
    logger.debug("not started", extra={"reason": message})
    # A message of ours may quote another error at the start of a line.
    own = [each for each in found if each[1] in _OWN]
    last = (own or found)[-1]
    return message[last.end() if own else last.start(1) :].strip()


_OWN = frozenset(
    error.__name__ for error in (StartError, ConfigError, SecretError, CheckpointError)
)
