"""What a person sees while a deployment starts: one line a process; and the banner once it is ready."""

import json

from rich.console import Console

from deploy.local import Child, LocalDeployment
from kvferry.shape import human_bytes

REQUEST_TOKENS = 1024


class ProgressLines:
    """Writes a line whenever a process reaches another state (loading shares are shown on a terminal only)."""

    def __init__(self, console: Console):
        self._console = console
        self._shown: dict[str, str] = {}

    def __call__(self, child: Child) -> None:
        text = child.state
        if child.state == "loading" and self._console.is_terminal:
            text = f"loading {child.share:.0%}"
        elif child.state == "listening":
            text = f"listening at {child.details.get('address') or child.details.get('http')}"
        if self._shown.get(child.name) != text:
            self._shown[child.name] = text
            pid = f"pid {child.pid}" if child.pid else ""
            self._console.print(f"  [bold]{child.name:<10}[/bold] {text:<34} [dim]{pid}[/dim]", highlight=False)


def banner(deployment: LocalDeployment) -> str:
    """Addresses, model, pools, what they hold, and a line to paste."""
    shape, router = deployment.shape, deployment.children["router"].details
    told = deployment.of("decode")[0].details
    per_token, tokens = (int(told[name]) for name in ("token_bytes", "pool_tokens"))
    num_prefill, num_decode = len(deployment.of("prefill")), len(deployment.of("decode"))
    length = min(REQUEST_TOKENS, tokens)
    question = {"role": "user", "content": "What is the capital of South Korea?"}
    body = {"model": router["model"], "messages": [question], "temperature": 0}
    memory = [
        f"  KV        {per_token:,} bytes a token; each pool holds {tokens:,} tokens ({human_bytes(tokens * per_token)}),",
        f"            that is {tokens // length:,} requests of {length:,} tokens",
    ]
    if deployment.plan.engine == "sim":
        what = f"{deployment.plan.sim_shape} on {deployment.plan.sim_accelerator}"
        memory = [f"  simulated the time of {what}; its text means nothing"]
    lines = [
        "",
        "kvferry is ready",
        f"  HTTP      http://{router['http']}/v1      gRPC  {router['grpc']}",
        f"  model     {router['model']}: {shape.num_weights / 1e6:.0f} M weights, context {shape.context_tokens} tokens",
        f"  pools     {num_prefill} prefill + {num_decode} decode, {deployment.threads} thread(s) each, {deployment.weights}",
        *memory,
        f"  logs      {deployment.folder}",
        "",
        "  try       "
        + f"curl http://{router['http']}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'",
        "",
    ]
    return "\n".join(lines)
