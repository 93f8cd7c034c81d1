"""`kvferry bench exact`: token ids through a running service against plain transformers, greedy, float32, one process.

The reference runs the same checkpoint through transformers' own modules and cache (kvferry/engine/reference.py). A step where
its two best logits are closer than EXCUSE_GAP may differ: such excuses are counted and printed, and may be 1 % of the prompts. An
answer of another length than was asked for is wrong.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from kvferry.errors import KvferryError
from loadtest.load import check_ready
from loadtest.texts import KINDS, text_of

EXCUSE_GAP = 1e-3
MAX_SHARE_EXCUSED = 0.01
MAX_PROMPT_TOKENS = 1500
BLOCK_SIZE = 16
EDGE_BLOCKS = (1, 2, 3, 4, 5, 8, 13, 21, 40, 64, 93)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`index` is the first step that differs; None if none does."""

    num_prompt_tokens: int
    kind: str
    index: int | None
    gap: float
    """Between the reference's two best logits at that step; infinite for an answer of the wrong length."""

    @staticmethod
    def of(
        kind: str, num_prompt_tokens: int, answer: list[int], expected: list[int], gaps: list[float]
    ) -> "Comparison":
        beside = zip(answer, expected, strict=False)
        index = next((k for k, (a, b) in enumerate(beside) if a != b), min(len(answer), len(expected)))
        if len(answer) != len(expected):
            return Comparison(num_prompt_tokens, kind, index, math.inf)
        differs = index < len(expected)
        return Comparison(num_prompt_tokens, kind, index if differs else None, gaps[index] if differs else 0.0)

    @property
    def is_excused(self) -> bool:
        return self.index is not None and self.gap < EXCUSE_GAP


def prompt_lengths(count: int) -> list[int]:
    """1, MAX_PROMPT_TOKENS and lengths around blocks' edges first; then lengths spread evenly on a logarithmic scale."""
    edges = [k * BLOCK_SIZE + d for k in EDGE_BLOCKS for d in (-1, 0, 1)]
    lengths = [1, MAX_PROMPT_TOKENS, 2, *edges]
    steps = max(count - len(lengths), 0)
    lengths += [round(MAX_PROMPT_TOKENS ** ((k + 0.5) / steps)) for k in range(steps)]
    return lengths[:count]


def make_prompts(directory: Path, count: int) -> list[tuple[str, list[int]]]:
    """(kind, token ids) of exact lengths, the three kinds in turn."""
    from kvferry.text.model_text import ModelText

    text, kinds = ModelText(directory), list(KINDS)
    prompts: list[tuple[str, list[int]]] = []
    for number, length in enumerate(prompt_lengths(count)):
        kind, pieces = kinds[(number + number // len(kinds)) % len(kinds)], 4
        while len(tokens := text.encode(text_of(kind, pieces, number))) < length:
            pieces *= 2
        prompts.append((kind, tokens[:length]))
    return prompts


async def compare_with_reference(
    url: str,
    directory: Path,
    num_prompts: int,
    output_tokens: int,
    must_equal: bool,
    as_json: bool,
    notes: Console,
    road: str = "auto",
) -> bool:
    """Prints what was found; True if token ids are equal but for few enough excuses, or need not be.

    And if all blocks came over `road`, and some did, where one is named: a road that does not work leaves the answers right.
    """
    prompts = make_prompts(directory, num_prompts)
    notes.print(f"asking the service for {len(prompts)} answers")
    answers: list[list[int]] = []
    blocks = Counter[str]()
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        await check_ready(client, url)
        for _, tokens in prompts:
            answer, numbers = await _ask(client, url, tokens, output_tokens)
            answers.append(answer)
            if numbers["fetched_blocks"]:
                blocks[str(numbers["road"])] += int(numbers["fetched_blocks"])
    notes.print("computing the reference")
    comparisons = await asyncio.to_thread(_compare, directory, prompts, answers, output_tokens, notes)
    is_right_road = road == "auto" or list(blocks) == [road]
    return (_report(comparisons, blocks, road, must_equal, as_json) or not must_equal) and is_right_road


def _compare(
    directory: Path, prompts: list[tuple[str, list[int]]], answers: list[list[int]], output_tokens: int, notes: Console
) -> list[Comparison]:
    from kvferry.engine.reference import Reference

    reference = Reference(directory)
    comparisons: list[Comparison] = []
    for number, ((kind, tokens), answer) in enumerate(zip(prompts, answers, strict=True), start=1):
        expected, gaps = reference.greedy(tokens, output_tokens)
        comparisons.append(Comparison.of(kind, len(tokens), answer, expected, gaps))
        if number % 10 == 0:
            notes.print(f"  {number} of {len(prompts)}")
    return comparisons


async def _ask(
    client: httpx.AsyncClient, url: str, tokens: list[int], output_tokens: int
) -> tuple[list[int], dict[str, Any]]:
    """The answer, and the numbers of its life."""
    body = {
        "prompt": tokens,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await client.post(f"{url}/v1/completions", json=body)
    if response.status_code != 200:
        raise KvferryError(f"HTTP {response.status_code} for a prompt of {len(tokens)} tokens: {response.text[:300]}")
    content = response.json()
    return content["choices"][0]["token_ids"], content["kvferry"][0]


def _report(
    comparisons: list[Comparison], blocks: Mapping[str, int], road: str, must_equal: bool, as_json: bool
) -> bool:
    """`blocks`: how many came over which road."""
    excused = [one for one in comparisons if one.is_excused]
    wrong = [one for one in comparisons if one.index is not None and not one.is_excused]
    holds = not wrong and len(excused) <= MAX_SHARE_EXCUSED * len(comparisons)
    equal = len(comparisons) - len(excused) - len(wrong)
    if as_json:
        figures = [
            {"figure": "prompts_equal", "value": equal, "unit": "prompts", "target": len(comparisons), "holds": holds},
            {"figure": "prompts_excused", "value": len(excused), "unit": "prompts"},
            {"figure": "prompts_wrong", "value": len(wrong), "unit": "prompts", "target": 0, "holds": not wrong},
            *(
                {"figure": f"blocks_fetched_{name}", "value": count, "unit": "blocks"}
                for name, count in (blocks or {"none": 0}).items()
            ),
        ]
        for figure in figures:
            print(json.dumps(figure))
        return holds
    for one in (*wrong, *excused):
        word = "excused" if one.is_excused else "WRONG" if must_equal else "parts"
        print(f"{word}: {one.num_prompt_tokens} tokens of {one.kind} differ from step {one.index} (gap {one.gap:.2e})")
    word = "wrong" if must_equal else "part from the reference"
    came = ", ".join(f"{count} blocks fetched over {name}" for name, count in blocks.items()) or "no blocks fetched"
    print(f"{equal} of {len(comparisons)} prompts equal, {len(excused)} excused, {len(wrong)} {word}; {came}")
    if road != "auto" and list(blocks) != [road]:
        print(f"WRONG: all of the blocks should have come over {road}")
    return holds
