"""Examples of vLLM with forks in one pod and in other stacks: valid, and with arguments of vLLM."""

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from apar_core.engine.async_engine import SCHEDULER_CLS
from apar_core.vllm_names import FlexibleArgumentParser, make_arg_parser
from tests.fakes.overlays import K8S, Object
from tests.unit.k8s.test_schemas import CRDS, _custom, violations

EXAMPLES = K8S / "examples" / "own-vllm"
REPOSITORY = K8S.parent
VERSION = "0.32.0"


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def deployment() -> Object:
    return documents("vllm.yaml")[0]


def production_stack() -> Object:
    [model] = documents("production-stack.values.yaml")[0]["servingEngineSpec"]["modelSpec"]
    return dict(model)


def kserve_container() -> Object:
    [container] = documents("kserve.yaml")[0]["spec"]["template"]["containers"]
    return dict(container)


def arguments_of_the_chart(model: Object) -> list[str]:
    """Return the arguments that production-stack's chart makes of a model's values."""
    config = model["vllmConfig"]
    caching = "" if config.get("enablePrefixCaching") else "no-"
    return [
        model["modelURL"],
        f"--{caching}enable-prefix-caching",
        f"--max-model-len={config['maxModelLen']}",
        f"--max-num-seqs={config['maxNumSeqs']}",
        *config["extraArgs"],
    ]


def arguments() -> dict[str, list[str]]:
    [pod] = deployment()["spec"]["template"]["spec"]["containers"]
    [added] = kserve_container()["env"]
    return {
        "vllm.yaml": pod["args"],
        "production-stack.values.yaml": arguments_of_the_chart(production_stack()),
        "kserve.yaml": ["/mnt/models", *shlex.split(added["value"])],
    }


@pytest.mark.parametrize("name", sorted(arguments()))
def test_vllm_takes_the_arguments_and_forks(name: str) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())

    args: Any = parser.parse_args(arguments()[name])

    assert args.model_tag
    assert args.scheduler_cls == SCHEDULER_CLS
    assert args.enable_prefix_caching
    [middleware] = args.middleware
    module, _, class_name = middleware.rpartition(".")
    assert isinstance(getattr(import_module(module), class_name), type)
    assert args.max_num_seqs > 256


def test_the_deployment_is_valid_and_its_service_reaches_it() -> None:
    objects = documents("vllm.yaml")
    [server, service] = objects

    assert violations(objects) == []
    template = server["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    [container] = template["spec"]["containers"]
    [port] = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert f"--port={port['containerPort']}" in container["args"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


def test_llm_d_selects_the_pods_and_names_its_plugins() -> None:
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    [pool] = documents("inference-pool.yaml")
    [values] = documents("llm-d.values.yaml")
    servers, picker = values["router"]["modelServers"], values["router"]["epp"]

    assert servers["matchLabels"].items() <= labels.items()
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert servers["targetPorts"] == pool["spec"]["targetPorts"] == [{"number": 8000}]
    config = yaml.safe_load(picker["pluginsCustomConfig"][picker["pluginsConfigFile"]])
    defined = {plugin["type"] for plugin in config["plugins"]}
    [profile] = config["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= defined


@pytest.mark.parametrize("name", ["inference-pool.yaml", "kserve.yaml"])
def test_custom_resources_are_valid(name: str) -> None:
    [resource] = documents(name)
    if _custom(resource["apiVersion"], resource["kind"]) is None:
        pytest.skip(f"no definition of {resource['kind']} in {CRDS}")

    assert violations([resource]) == []
    resource["spec"]["tempalte"] = {}
    assert len(violations([resource])) == 1


def test_the_image_is_vllms_with_this_package_and_its_name_is_used() -> None:
    text = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    [pod] = deployment()["spec"]["template"]["spec"]["containers"]

    assert f"FROM vllm/vllm-openai:v{VERSION}" in text
    assert all((REPOSITORY / source).exists() for sources in copied for source in sources)
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert all(f"!{source}" in ignored for sources in copied for source in sources)
    [tag] = re.findall(r"-t (\S+)", text)
    assert pod["image"] == tag
    model = production_stack()
    assert f"{model['repository']}:{model['tag']}".endswith(tag)
    assert kserve_container()["image"].endswith(tag)
    # Pods run as the user that the image has.
    assert (
        f"--uid {deployment()['spec']['template']['spec']['securityContext']['runAsUser']}" in text
    )
    assert Path("/home/vllm") == Path(next(e["value"] for e in pod["env"] if e["name"] == "HOME"))
