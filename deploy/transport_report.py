"""`kvferry bench transport`: prints the figures of loadtest/transport.py beside their targets."""

import json

from rich.console import Console
from rich.table import Table


async def print_transport_figures(roads: list[str], num_rounds: int, as_json: bool) -> None:
    """Raises ConfigurationError for an unknown road, FetchFailed where one does not work here."""
    from loadtest.transport import COMPARED_WITH, MAX_CHECK_SHARES, TARGETS, measure_roads

    table = Table("road", "size", "ms", "GB/s", "compared with", "GB/s", "ratio", "target", "again", "checking")
    async for figure in measure_roads(roads, num_rounds):
        rate, bare_rate = (figure.num_bytes / seconds / 1e9 for seconds in (figure.fetch_s, figure.bare_s))
        target, max_check = TARGETS.get(figure.road), MAX_CHECK_SHARES.get(figure.road)
        if as_json:
            common = {"unit": "ratio", "road": figure.road, "size": figure.size, "bytes": figure.num_bytes}
            speed = {"ms": round(figure.fetch_s * 1e3, 2), "gb_s": round(rate, 2), "bare_gb_s": round(bare_rate, 2)}
            ratio = {"figure": f"{figure.road}_ratio", "value": round(figure.ratio, 3)}
            limit = {} if target is None else {"target": target, "holds": figure.ratio >= target}
            print(json.dumps({**ratio, **common, **limit, **speed, "compared_with": COMPARED_WITH[figure.road]}))
            if figure.road == "ray":
                continue
            again = {"figure": f"{figure.road}_again_ratio", "value": round(figure.again_ratio, 3)}
            print(json.dumps({**again, **common, "ms": round(figure.again_s * 1e3, 2)}))
            check = {"figure": f"{figure.road}_check_share", "value": round(figure.check_share, 3), **common}
            limit = {} if max_check is None else {"target": max_check, "holds": figure.check_share <= max_check}
            print(json.dumps({**check, **limit}), flush=True)
        else:
            row = (figure.road, figure.size, f"{figure.fetch_s * 1e3:.1f}", f"{rate:.2f}", COMPARED_WITH[figure.road])
            more = ("", "") if figure.road == "ray" else (f"{figure.again_ratio:.2f}", f"{figure.check_share:.0%}")
            limit = "" if target is None else f"{target:.2f}"
            table.add_row(*row, f"{bare_rate:.2f}", f"{figure.ratio:.2f}", limit, *more)
    if not as_json:
        Console(highlight=False, width=max(Console().width, 110)).print(table)
        print("again: the ratio of blocks that were sent before, or came from elsewhere: their digests are known")
        print("checking: what a transfer without digests saves (neither is measured between actors)")
