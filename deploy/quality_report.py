"""Prints the figures of kvferry/engine/quality.py: what each kind of weights and KV costs against float32."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def print_quality(
    directory: Path, kinds: Sequence[str], kv: str, num_threads: int, as_json: bool, device: str = "cpu"
) -> None:
    from kvferry.engine.quality import measure_quality

    table = Table("weights", "kv", "tokens", "perplexity", "agreement", "mean KL, nats", "largest logit difference")
    for quality in measure_quality(directory, kinds, num_threads, kv=kv, device=device):
        if as_json:
            common = {
                "figure": f"perplexity_{quality.kind}",
                "value": round(quality.perplexity, 5),
                "unit": "perplexity",
            }
            origin = {
                "peer": "kvferry",
                "threads": num_threads,
                "weights": quality.kind,
                "kv": quality.kv,
                "device": device,
                "tokens": quality.num_tokens,
            }
            distance = {
                "agreement": round(quality.agreement, 5),
                "mean_kl": quality.mean_kl,
                "max_logit_difference": quality.max_logit_difference,
            }
            print(json.dumps({**common, **origin, **distance}), flush=True)
        else:
            distance = (f"{quality.agreement:.2%}", f"{quality.mean_kl:.2e}", f"{quality.max_logit_difference:.2e}")
            table.add_row(quality.kind, quality.kv, str(quality.num_tokens), f"{quality.perplexity:.4f}", *distance)
    if not as_json:
        Console(highlight=False).print(table)
