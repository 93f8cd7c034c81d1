"""What a router adds to the first token and how many tokens a second pass through it: ours, and others in front of stub workers.

*Added TTFT* is measured with one stream: a client's median TTFT through a router less that without it, in the same round. Without
ours the client is attached to the decode worker as the router is; without a peer's it asks the stub. Told besides is what ours takes
beyond the worker's own time, by the server's instants: with the two gRPC hops, that is, which an attached client has, too. That one
keeps its stream, so that of new connections ours bears what the subtraction takes from the peers'. The length of a step and of an
answer are the same for all, and so are the requests through a router. Each contender takes its turn in every round, and figures are
medians over the rounds.
"""

import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import KvferryError
from loadtest.attached_load import AttachedOrder, run_attached
from loadtest.raw_load import LoadOrder, run_load
from loadtest.raw_stream import RawAnswer
from loadtest.router_figures import MAX_ADDED_TTFT_MS, MIN_TOKENS_PER_S, RouterFigure

NUM_STREAMS, OUTPUT_TOKENS = 64, 64
SINGLE_ROUNDS, STREAM_ROUNDS = 60, 10
PROMPT_TOKENS = 20
"""Of an attached client's prompts, which has no tokenizer: about as many as those of the others."""
OURS, DIRECT, ATTACHED = "kvferry", "no router", "attached"
"""The last two are asked without a router: a peer's stub, and our worker."""


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one turn, seconds."""

    contestant: str
    ttft_s: float
    """One stream, each request over a connection of its own."""
    kept_ttft_s: float
    """The same over one connection that is kept."""
    tokens_per_s: float = 0.0
    events_per_s: float = 0.0
    """Fewer than tokens where a slow reader's tokens were sent together."""
    busy_ttft_s: float = 0.0
    """With all streams, the worker's part and the wait for it included."""
    beyond_worker_s: float | None = None
    """Of `kept_ttft_s`, without the worker's own time; None where it is not told."""

    @property
    def told(self) -> str:
        """While it goes on, for people. An attached client has one stream only."""
        ttft = f"TTFT {self.kept_ttft_s * 1e3:.2f} ms"
        return ttft if self.contestant == ATTACHED else f"{ttft}, {self.tokens_per_s:,.0f} tokens/s"


async def read_in_turn(
    contestants: Sequence[Contestant], num_rounds: int, address: str, secret_file: str
) -> AsyncIterator[Reading]:
    """The last two are of our decode worker. Raises KvferryError for a contestant that does not answer as it should."""
    order = AttachedOrder(address, secret_file, SINGLE_ROUNDS, PROMPT_TOKENS, OUTPUT_TOKENS)
    for contestant in contestants:
        await _answers(contestant, num_streams=8, num_rounds=2)
    for _ in range(num_rounds):
        attached_s = statistics.median(await run_attached(order))
        yield Reading(ATTACHED, attached_s, attached_s)
        for contestant in contestants:
            yield await _read(contestant)


async def _read(contestant: Contestant) -> Reading:
    fresh = await _answers(contestant, num_rounds=SINGLE_ROUNDS, is_kept=False)
    kept = await _answers(contestant, num_rounds=SINGLE_ROUNDS)
    busy = await _answers(contestant, num_streams=NUM_STREAMS, num_rounds=STREAM_ROUNDS)
    return reading_of(contestant.name, fresh, kept, busy)


async def _answers(
    contestant: Contestant, num_streams: int = 1, num_rounds: int = 1, is_kept: bool = True
) -> list[RawAnswer]:
    order = LoadOrder(contestant.url, contestant.model, num_streams, num_rounds, is_kept=is_kept)
    answers = await run_load(order)
    broken = [answer for answer in answers if answer.status != 200 or not answer.is_whole]
    if broken:
        raise KvferryError(f"{contestant.name}: {len(broken)} of {len(answers)} answers failed: {broken[0]}")
    return answers


def reading_of(name: str, fresh: Sequence[RawAnswer], kept: Sequence[RawAnswer], busy: Sequence[RawAnswer]) -> Reading:
    wall_s = max(answer.ended_s for answer in busy) - min(answer.sent_s for answer in busy)
    beyond_worker = [answer.ttft_s - answer.worker_s for answer in kept if answer.worker_s is not None]
    return Reading(
        name,
        statistics.median(answer.ttft_s for answer in fresh),
        statistics.median(answer.ttft_s for answer in kept),
        sum(answer.num_tokens for answer in busy) / wall_s,
        sum(answer.num_events for answer in busy) / wall_s,
        statistics.median(answer.ttft_s for answer in busy),
        statistics.median(beyond_worker) if beyond_worker else None,
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """A contestant's medians over the rounds."""

    contestant: str
    added_ttft_ms: float
    kept_added_ttft_ms: float
    tokens_per_s: float
    events_per_s: float
    busy_ttft_ms: float
    beyond_worker_ms: float


def standings_of(readings: Sequence[Reading]) -> dict[str, Standing]:
    """By contestant. A router's TTFT is less that without it in the same round."""
    by_name: dict[str, list[Reading]] = {}
    for reading in readings:
        by_name.setdefault(reading.contestant, []).append(reading)
    without = {OURS: by_name.get(ATTACHED, []), DIRECT: [], ATTACHED: []}
    return {name: _standing(name, own, without.get(name, by_name.get(DIRECT, []))) for name, own in by_name.items()}


def _standing(name: str, own: Sequence[Reading], less: Sequence[Reading]) -> Standing:
    def median(of: str) -> float:
        return statistics.median(getattr(reading, of) for reading in own)

    def added_ms(of: str) -> float:
        base = [getattr(reading, of) for reading in less] or [0.0] * len(own)
        return 1e3 * statistics.median(
            getattr(reading, of) - without for reading, without in zip(own, base, strict=False)
        )

    added = (added_ms("ttft_s"), added_ms("kept_ttft_s"))
    beyond_worker = statistics.median(reading.beyond_worker_s or 0.0 for reading in own)
    busy_ttft_ms = median("busy_ttft_s") * 1e3
    return Standing(name, *added, median("tokens_per_s"), median("events_per_s"), busy_ttft_ms, beyond_worker * 1e3)


def figures_of(standings: Mapping[str, Standing]) -> list[RouterFigure]:
    """Ours beside their targets, then what each peer has and the ratios of ours to it."""
    ours, figures = standings[OURS], list[RouterFigure]()
    figures += [
        RouterFigure(
            "added_ttft", ours.added_ttft_ms, "ms", at_most=MAX_ADDED_TTFT_MS, note="one stream, new connections"
        ),
        RouterFigure(
            "added_ttft_kept",
            ours.kept_added_ttft_ms,
            "ms",
            at_most=MAX_ADDED_TTFT_MS,
            note="one stream, one connection",
        ),
        RouterFigure(
            "beyond_worker",
            ours.beyond_worker_ms,
            "ms",
            note="one connection, all but the worker's own time: two gRPC hops included",
        ),
        RouterFigure(
            "tokens_per_s",
            ours.tokens_per_s,
            "tokens/s",
            at_least=MIN_TOKENS_PER_S,
            note=f"{NUM_STREAMS} streams; {ours.events_per_s:,.0f} events/s",
        ),
        RouterFigure("busy_ttft", ours.busy_ttft_ms, "ms", note=f"{NUM_STREAMS} streams, worker included"),
    ]
    if ATTACHED in standings:
        alone_ms = standings[ATTACHED].added_ttft_ms
        figures.append(RouterFigure("attached_ttft", alone_ms, "ms", note="a client of the worker alone"))
    for name, peer in standings.items():
        if name not in (OURS, ATTACHED):
            figures += _figures_beside(ours, peer)
    return figures


def _figures_beside(ours: Standing, peer: Standing) -> list[RouterFigure]:
    name = peer.contestant.replace(" ", "_")
    shown = [
        RouterFigure(f"{name}_tokens_per_s", peer.tokens_per_s, "tokens/s"),
        RouterFigure(f"{name}_busy_ttft", peer.busy_ttft_ms, "ms"),
        RouterFigure(f"tokens_ratio_to_{name}", ours.tokens_per_s / peer.tokens_per_s, "times"),
    ]
    if peer.contestant == DIRECT:
        return shown
    for what, mine, theirs in (
        ("added_ttft", ours.added_ttft_ms, peer.added_ttft_ms),
        ("added_ttft_kept", ours.kept_added_ttft_ms, peer.kept_added_ttft_ms),
    ):
        shown.append(RouterFigure(f"{name}_{what}", theirs, "ms"))
        if theirs > 0:
            shown.append(RouterFigure(f"{what}_ratio_to_{name}", mine / theirs, "times"))
    return shown
