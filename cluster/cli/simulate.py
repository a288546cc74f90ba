"""`apar simulate`: a cluster of virtual engines behind the product's own router and autoscaler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cluster.cli.options import (
    CommaList,
    Duration,
    duration_option,
    list_option,
    none_of,
    out_option,
    wrong_value,
)
from cluster.cli.terminal import clear_errors, show_report, stage_progress
from deployments.config.routing import RoutingPolicy

_CLUSTER, _LOAD, _FAULTS = "Cluster", "Load", "Faults and scaling"
_FORK_POLICIES = ("eager", "adaptive", "off")


def simulate(
    trace: Annotated[
        list[Path],
        typer.Option(
            help="Recorded answers: JSON lines with `prompt` and `response`. Repeatable.",
            dir_okay=False,
            exists=True,
            rich_help_panel=_LOAD,
        ),
    ],
    out: Annotated[Path, out_option("simulate")],
    model: Annotated[
        str,
        typer.Option(
            help="llama-7b, llama-13b, llama-3-8b, llama-3-70b, a checkpoint folder or a "
            "config.json.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "llama-7b",
    gpu: Annotated[
        str,
        typer.Option(help="GPU, such as a100-80gb, h100 or l4.", rich_help_panel=_CLUSTER),
    ] = "a100-80gb",
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs per replica.", rich_help_panel=_CLUSTER)
    ] = 1,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="Step costs measured by `apar experiment calibrate`, instead of the predicted "
            "ones.",
            dir_okay=False,
            exists=True,
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            help="ordinary, or family: threads of a request read shared KV blocks once.",
            metavar="ordinary|family",
            rich_help_panel=_CLUSTER,
        ),
    ] = "ordinary",
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="KV cache per replica (tokens; default: what fits beside the weights).",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    replicas: Annotated[
        CommaList[int],
        list_option(help="Numbers of replicas at the start.", item=int, minimum=1),
    ] = CommaList((8,)),
    router: Annotated[
        CommaList[str],
        list_option(
            help=f"Routing policies to compare: {', '.join(RoutingPolicy)}.",
            choices=[policy.value for policy in RoutingPolicy],
        ),
    ] = CommaList(("threads",)),
    fork_policy: Annotated[
        CommaList[str],
        list_option(
            help=f"Fork policies to compare: {', '.join(_FORK_POLICIES)}.", choices=_FORK_POLICIES
        ),
    ] = CommaList(("eager",)),
    token_time: Annotated[
        float, duration_option(help="Target time per token of the adaptive fork policy.")
    ] = Duration.of("50ms"),
    concurrency: Annotated[
        int, typer.Option(min=1, help="Limit on the running requests of a replica.")
    ] = 350,
    gateways: Annotated[int, typer.Option(min=1, help="Number of gateways.")] = 1,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            help="Recorded arrivals: a table with TIMESTAMP and ContextTokens, compressed to the "
            "rate (default: a Poisson process).",
            dir_okay=False,
            exists=True,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        CommaList[float] | None,
        list_option(
            help="Requests per second of the whole cluster.", item=float, minimum=1e-3, default=""
        ),
    ] = None,
    load: Annotated[
        CommaList[float],
        list_option(
            help="Instead of --rate: shares of the rate at which saturated replicas end requests.",
            item=float,
            minimum=1e-3,
        ),
    ] = CommaList((0.85,)),
    duration: Annotated[
        float, duration_option(help="Time in which requests arrive.", minimum="1s", panel=_LOAD)
    ] = Duration.of("60s"),
    surge: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Multiple of the rate in the middle third of the duration.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 1,
    slow: Annotated[
        int, typer.Option(min=0, help="Number of slow replicas.", rich_help_panel=_FAULTS)
    ] = 0,
    slowness: Annotated[
        float,
        typer.Option(min=1.0, help="Factor on their step costs.", rich_help_panel=_FAULTS),
    ] = 2.0,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            help="Time at which a replica dies, such as 20s. Repeatable.", rich_help_panel=_FAULTS
        ),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            help="Time at which a further replica serves. Repeatable.", rich_help_panel=_FAULTS
        ),
    ] = None,
    start_delay: Annotated[
        float, duration_option(help="Time that a replica takes to start.", panel=_FAULTS)
    ] = Duration.of("60s"),
    autoscale: Annotated[
        str | None,
        typer.Option(
            help="Let the number of replicas follow the load, within MIN-MAX.",
            metavar="MIN-MAX",
            rich_help_panel=_FAULTS,
        ),
    ] = None,
    target_threads: Annotated[
        CommaList[float] | None,
        list_option(
            help="With --autoscale: threads per replica to aim at.",
            item=float,
            minimum=1,
            default="a quarter of what a replica runs",
        ),
    ] = None,
    catch_up: Annotated[
        CommaList[float] | None,
        list_option(
            help="With --autoscale: values of `catch_up_s` (seconds).",
            item=float,
            minimum=0,
            default="the configuration's",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run cases in parallel.")] = 1,
) -> None:
    """Simulate a cluster in virtual time.

    Each replica is vLLM's engine core with our scheduler and no model. The duration of a step comes
    from the step costs of the GPU. Router, fork policy, retries and autoscaler are the product's.
    Options with several values span a table with a row for each combination.

    Example: [bold]apar simulate --trace ANSWERS.jsonl --replicas 8 --slow 1
    --router threads,power_of_two --seeds 3[/bold]
    """
    if autoscale is None and (target_threads or catch_up):
        raise wrong_value("--autoscale", "--target-threads and --catch-up need --autoscale")
    if attention not in ("ordinary", "family"):
        raise wrong_value("--attention", none_of(attention, ("ordinary", "family")))
    if slow > min(replicas):
        raise wrong_value("--slow", f"{slow} of {min(replicas)} replicas cannot be slow")
    kills, joins = _times("--kill", kill), _times("--join", join)
    bounds = None if autoscale is None else _bounds(autoscale)
    with clear_errors(), stage_progress() as progress:
        # These import vLLM, which takes seconds.
        from cluster.lab.simulation.report import simulation_report
        from cluster.lab.simulation.runs import SimulationSettings, run_cases

        settings = SimulationSettings(
            **replica_settings(model, gpu, tensor_parallel, costs, kv_tokens, attention),
            traces=tuple(trace),
            arrivals=arrivals,
            replicas=replicas,
            rates=rate or (),
            loads=load,
            routers=router,
            fork_policies=fork_policy,
            token_time_ms=1000 * token_time,
            concurrency=concurrency,
            duration_s=duration,
            seeds=seeds,
            slow=slow,
            slowness=slowness,
            kills=kills,
            joins=joins,
            start_s=start_delay,
            surge=surge,
            autoscale=bounds,
            target_threads=target_threads or (None,),
            catch_up_s=catch_up or (None,),
            gateways=gateways,
        )
        try:
            results, capacity = run_cases(settings, jobs, progress.start)
        except ValidationError as error:
            raise wrong_value("--autoscale", str(error.errors()[0]["msg"])) from error
    show_report(simulation_report(settings, results, capacity), out)


def replica_settings(
    model: str,
    gpu: str,
    tensor_parallel: int,
    costs: Path | None = None,
    kv_tokens: int | None = None,
    attention: str = "ordinary",
) -> dict[str, Any]:
    """Return the fields of `SimulationSettings` that describe a replica.

    Raises StepCostsError for an unknown model or GPU, or a file of costs that cannot be read.
    """
    from apar_core.attention.settings import FamilySettings
    from apar_core.step_costs.files import read_costs
    from apar_core.step_costs.gpus import find_gpu
    from apar_core.step_costs.models import find_model
    from apar_core.step_costs.predict import BLOCK_SIZE, step_costs
    from apar_core.step_costs.predict import kv_tokens as fitting_tokens

    size, device = find_model(model), find_gpu(gpu)
    block_bytes = size.block_layer_bytes(BLOCK_SIZE, tensor_parallel)
    return {
        "costs": step_costs(size, device, tensor_parallel) if costs is None else read_costs(costs),
        "config": size.config,
        "kv_tokens": kv_tokens or fitting_tokens(size, device, tensor_parallel),
        "family": FamilySettings.for_blocks(block_bytes) if attention == "family" else None,
    }


def _times(option: str, texts: list[str] | None) -> tuple[float, ...]:
    from cluster.durations import parse_duration

    try:
        return tuple(sorted(parse_duration(text) for text in texts or ()))
    except ValueError as error:
        raise wrong_value(option, str(error)) from error


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit()):
        raise wrong_value("--autoscale", f"{text!r} is not MIN-MAX, such as 2-16")
    return int(low), int(high)
