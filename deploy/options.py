"""Options that several subcommands of `kvferry` share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    Path | None, typer.Option("--model", help="Checkpoint directory or GGUF file; the packaged model if not given.")
]
Prefill = Annotated[
    int, typer.Option("--prefill", min=0, help="Prefill workers; 0: decode workers compute everything.")
]
Decode = Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")]
KvTokens = Annotated[int, typer.Option("--kv-tokens", min=0, help="Tokens per pool; 0: from the memory there is.")]
Weights = Annotated[
    Literal["float32", "float16", "bfloat16", "int8", "auto"],
    typer.Option(
        "--weights",
        help="How weights are kept; auto is float16, unless a weight does not fit; on a device the checkpoint's.",
    ),
]
Kv = Annotated[
    Literal["float32", "float16", "bfloat16", "auto"],
    typer.Option(
        "--kv", help="What the pools keep and ship; 16 bits are half the bytes; auto: float32, on a device as weights."
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where steps run: cpu, cuda or cuda:N.")]
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
Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="KVFERRY_RAY_ADDRESS",
        help="Of a Ray cluster: its head's host:port, auto (the one on this node), or ray://HEAD:10001 from elsewhere.",
    ),
]
Namespace = Annotated[str, typer.Option("--namespace", help="Of Ray: one deployment in each.")]
