"""The vLLM plugin: forks where our scheduler is named, and nothing anywhere else."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine import async_llm, llm_engine
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from apar_core.attention.selection import reads_families
from apar_core.cpu_worker import ForkCPUWorker
from apar_core.engine.async_engine import SCHEDULER_CLS
from apar_core.engine.input_processor import ForkInputProcessor
from apar_core.engine.plugin import register
from apar_core.errors import EngineError
from apar_core.installation import ROOT
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.scheduler.fork_scheduler import ForkScheduler
from apar_core.scheduler.fork_settings import check_engine
from apar_core.vllm_names import is_supported

# The function without its cache: each call is a new process's.
register_anew: Any = register.__wrapped__


@pytest.fixture
def stock_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as it is imported, without what other tests have installed."""
    create: Any = EngineArgs.create_engine_config
    monkeypatch.setattr(EngineArgs, "create_engine_config", getattr(create, "__wrapped__", create))
    for engine in (async_llm, llm_engine):
        monkeypatch.setattr(engine, "InputProcessor", InputProcessor)
        monkeypatch.setattr(engine, "OutputProcessor", OutputProcessor)


def configuration(*, enable_prefix_caching: bool = True, **arguments: Any) -> Any:
    return EngineArgs(
        model=str(checkpoint_path()), enable_prefix_caching=enable_prefix_caching, **arguments
    ).create_engine_config()


def built_by_engines() -> set[type]:
    return {vars(engine)["InputProcessor"] for engine in (async_llm, llm_engine)}


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize(
    "scheduler_cls", [None, "vllm.v1.core.sched.scheduler.Scheduler"], ids=["default", "vLLM's"]
)
def test_an_engine_without_our_scheduler_is_vllms_own(scheduler_cls: str | None) -> None:
    register_anew()

    config = configuration(scheduler_cls=scheduler_cls)

    assert config.scheduler_config.scheduler_cls == scheduler_cls
    assert not config.model_config.logits_processors
    assert built_by_engines() == {InputProcessor}


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize(
    ("speculation", "warns"),
    [
        ({"method": "medusa", "model": str(SHIPPED_HEADS["apar-tiny"])}, True),
        ({"method": "ngram", "prompt_lookup_max": 3}, False),
        (None, False),
    ],
    ids=["medusa", "n-gram", "none"],
)
def test_speculation_that_needs_a_deprecated_runner_is_named(
    caplog: pytest.LogCaptureFixture, speculation: dict[str, Any] | None, warns: bool
) -> None:
    register_anew()
    if speculation is not None:
        speculation = {"num_speculative_tokens": 2, **speculation}

    configuration(scheduler_cls=SCHEDULER_CLS, speculative_config=speculation)

    assert ("method medusa needs vLLM's V1 model runner" in caplog.text) == warns


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("lora", [{}, {"enable_lora": True, "max_loras": 1}], ids=["", "lora"])
@pytest.mark.parametrize("attention", ["ordinary", "family"])
def test_workers_on_cpus_are_ours_also_with_adapters_and_families(
    attention: str, lora: dict[str, Any]
) -> None:
    register_anew()

    config = configuration(
        scheduler_cls=SCHEDULER_CLS, additional_config={"apar": {"attention": attention}}, **lora
    )

    assert reads_families(config) == (attention == "family")
    assert issubclass(resolve_obj_by_qualname(config.parallel_config.worker_cls), ForkCPUWorker)


@pytest.mark.usefixtures("stock_vllm")
def test_a_scheduler_that_does_not_exist_is_vllms_error_unless_it_should_be_ours() -> None:
    register_anew()

    other = configuration(scheduler_cls="json.NoSuchScheduler")

    assert other.scheduler_config.scheduler_cls == "json.NoSuchScheduler"
    with pytest.raises(EngineError, match=r"'apar_core\.scheduler\.ForkScheduler' does not exist"):
        configuration(scheduler_cls="apar_core.scheduler.ForkScheduler")


@pytest.mark.usefixtures("stock_vllm")
def test_our_scheduler_without_the_plugin_is_refused() -> None:
    config = configuration(scheduler_cls=SCHEDULER_CLS)

    with pytest.raises(EngineError, match="VLLM_PLUGINS, if set, must contain apar"):
        check_engine(config)


@pytest.mark.usefixtures("stock_vllm")
def test_prefix_caching_must_be_on_before_any_process_starts() -> None:
    register_anew()

    with pytest.raises(EngineError, match="forking needs prefix caching"):
        configuration(scheduler_cls=SCHEDULER_CLS, enable_prefix_caching=False)


@pytest.mark.usefixtures("stock_vllm")
def test_an_engine_with_our_scheduler_gets_our_processors() -> None:
    register_anew()
    register_anew()

    config = configuration(scheduler_cls=SCHEDULER_CLS)

    assert config.scheduler_config.scheduler_cls is ForkScheduler
    assert built_by_engines() == {ForkInputProcessor}


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev"])
def test_the_plugin_warns_and_stays_out_of_an_unknown_vllm(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    before = EngineArgs.create_engine_config

    with caplog.at_level(logging.WARNING, "apar_core"):
        register_anew()

    assert EngineArgs.create_engine_config is before
    assert [record.getMessage() for record in caplog.records] == [
        f"apar-serve stays out of vLLM {version}: it was checked with vLLM 0.32 and 0.33"
    ]


@pytest.mark.usefixtures("stock_vllm")
def test_the_plugin_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(EngineArgs, "create_engine_config")

    with caplog.at_level(logging.WARNING, "apar_core"):
        register_anew()

    assert "stays out of vLLM" in caplog.text


def test_our_scheduler_in_an_unknown_vllm_is_refused_with_the_versions() -> None:
    program = (
        "import sys, types; sys.modules['vllm'] = types.SimpleNamespace(__version__='0.34.0');"
        "import apar_core.scheduler.request_gate"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{EngineError.__module__}.EngineError: vLLM 0.34.0 is installed")
    assert "vLLM 0.32 and 0.33" in last


def test_loading_the_plugin_imports_only_itself() -> None:
    program = (
        "import sys; known = set(sys.modules); import apar_core.engine.plugin;"
        "print(*{name for name in set(sys.modules) - known})"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    loaded = {name for name in done.stdout.split() if name.partition(".")[0] == "apar_core"}
    assert loaded == {
        "apar_core",
        "apar_core.engine",
        "apar_core.engine.plugin",
        "apar_core.engine.start_stages",
        "apar_core.errors",
        "apar_core.vllm_log",
        "apar_core.vllm_names",
    }


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.32.0", True), ("0.33.1+cpu", True), ("0.3.2", False), ("0.330.0", False), ("dev", False)],
)
def test_builds_and_patches_of_a_version_do_not_matter(version: str, known: bool) -> None:
    assert is_supported(version) == known
