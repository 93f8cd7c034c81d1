"""`kvferry bench`: the measurements. Each one's work is elsewhere and imported when it is called."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deploy.command import directory_of, ended_in_order, notes, run_command, told_errors
from deploy.deployments import deployment_of
from deploy.local import LocalPlan
from deploy.options import (
    Address,
    Decode,
    Device,
    Json,
    Kv,
    Model,
    Namespace,
    Prefill,
    SimAccelerator,
    SimShape,
    Transport,
    Url,
    Weights,
)
from deploy.progress import ProgressLines

bench_app = typer.Typer(no_args_is_help=True, help="Measurements. With --json, one object a line.")


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
    kv: Kv = "auto",
    device: Device = "cpu",
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
        run_command(measure_from_cluster())
        return
    plan = None if url else LocalPlan(directory_of(model), prefill, decode, weights=weights, kv=kv, device=device)
    run_command(_at_service(measure, url, plan))


@bench_app.command("engine")
def bench_engine(
    model: Model = None,
    weights: Weights = "float32",
    kv: Kv = "float32",
    device: Device = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Steps of one engine on the peers' workloads, with the floor that this machine sets. Let nothing else run."""
    from deploy.engine_report import print_engine_figures

    directory = directory_of(model)
    with told_errors():
        print_engine_figures(directory, weights, kv, threads, as_json, device)


@bench_app.command("exact")
def bench_exact(
    prompts: Annotated[int, typer.Option("--prompts", min=1)] = 50,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1)] = 32,
    url: Url = None,
    model: Model = None,
    prefill: Prefill = 1,
    decode: Decode = 1,
    weights: Weights = "float32",
    kv: Kv = "auto",
    device: Device = "cpu",
    transport: Transport = "auto",
    as_json: Json = False,
) -> None:
    """Token ids through the service against plain transformers, greedy, float32. Exit code 1 if they differ, or if blocks came over
    another road than a named one.

    With other weights or KV than float32 it tells how many answers part, and where; with --url, say what the service has.
    """
    from loadtest.exact import compare_with_reference

    directory = directory_of(model)

    async def measure(at: str) -> None:
        must_equal = weights == "float32" and kv in ("float32", "auto")
        if not await compare_with_reference(
            at, directory, prompts, output_tokens, must_equal, as_json, notes, transport
        ):
            raise typer.Exit(1)

    plan = LocalPlan(directory, prefill, decode, weights=weights, kv=kv, device=device, transport=transport)
    run_command(_at_service(measure, url, plan))


@bench_app.command("quality")
def bench_quality(
    model: Model = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", help="float32, float16, bfloat16 or int8; may be given more than once."),
    ] = None,
    kv: Kv = "float32",
    device: Device = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """What kinds of weights and KV lose: perplexity and greedy agreement with float32, on a text that comes with kvferry."""
    from deploy.quality_report import print_quality

    directory = directory_of(model)
    with told_errors():
        kinds = weights or ["float16", "bfloat16", *(["int8"] if device == "cpu" else [])]
        print_quality(directory, kinds, kv, threads, as_json, device)


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

    run_command(print_transport_figures(transport or [], rounds, as_json))


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

    run_command(print_handoff_figures(directory_of(model), transport or [], as_json, notes))


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

    directory = directory_of(model)
    with told_errors(), ended_in_order():
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

    bench = RouterBench(directory_of(model), peers, decode, rounds, overload_s, index_blocks, announce_every)
    run_command(print_router_figures(bench, part or [], as_json, notes))


@bench_app.command("pd")
def bench_pd(
    rates: Annotated[str, typer.Option(help="Requests/s on this machine, rising, with commas.")] = "0.5,1,1.5,2,2.5",
    seconds: Annotated[float, typer.Option(min=1, help="In which requests come, at each rate.")] = 30.0,
    lengths: Annotated[Literal["azure", "mix"], typer.Option(help="mix: chats amid long prompts.")] = "mix",
    trace: Annotated[Path | None, typer.Option(help="Azure CSV or Mooncake JSON lines, instead of --lengths.")] = None,
    scale: Annotated[float, typer.Option(min=0.001, help="Lengths of the real part are so many times as long.")] = 0.2,
    max_prompt: Annotated[int, typer.Option(min=1, help="Longest prompt of the real part, in tokens.")] = 2048,
    max_output: Annotated[int, typer.Option(min=1, help="Longest answer of the real part, in tokens.")] = 128,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of every answer, in both parts; default: the lengths' own.")
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            help="Percent of what the slowest layout can do, which is measured first, instead of rates: 25,50,80."
        ),
    ] = None,
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
    from loadtest.trial import Trial, read_loads, read_rates

    report = PdReport(as_json)

    def trial(at: str, seconds: float, fit: Fit, ttft_ms: float, tpot_ms: float) -> Trial:
        slo = Slo((slo_ttft_ms or ttft_ms) / 1e3, (slo_tpot_ms or tpot_ms) / 1e3)
        rows = read_trace(trace) if trace else ()
        if load is not None:
            return Trial((), seconds, slo, fit, lengths, rows, loads=read_loads(load))
        return Trial(read_rates(at), seconds, slo, fit, lengths, rows)

    async def measure(plan: RealPlan) -> None:
        async for one in measure_real(plan, notes):
            report.add(one)

    with told_errors():
        if picture:
            check_can_draw()
        real_trial = trial(rates, seconds, Fit(scale, max_prompt, max_output, output_tokens), 3000, 100)
        sim_trial = trial(sim_rates, sim_seconds, Fit(num_output=output_tokens), 500, 25)
        itl_target_s = None if itl_target_ms is None else itl_target_ms / 1e3
        sim_plan = SimPlan(sim_trial, sim_shape, sim_accelerator, sim_workers, itl_target_s)
        real_trial.check()
        sim_plan.check()
    if real:
        run_command(measure(RealPlan(directory_of(model), real_trial, weights, itl_target_ms)))
    with told_errors():
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
