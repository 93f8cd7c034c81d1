"""Runs plans with the plain torch decoder: plan to batch, forward, logits where a token is wanted, sampling."""

import torch

from kvferry.engine.attention import Span
from kvferry.engine.llama import MIN_ROWS, Batch, Llama
from kvferry.engine.plan import Chunk, Plan, StepResult
from kvferry.engine.sampling import sample_rows
from kvferry.engine.torch_memory import TorchMemory


class TorchRunner:
    def __init__(self, model: Llama, memory: TorchMemory):
        self._model, self._memory = model, memory

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        hidden = self._model.forward(self._batch(plan), self._memory)
        ends, last_rows = 0, list[int]()
        drawing = list[Chunk]()
        for chunk in plan.chunks:
            ends += len(chunk.tokens)
            if chunk.draw is not None:
                drawing.append(chunk)
                last_rows.append(ends - 1)
        if not drawing:
            return StepResult({})
        return sample_rows(drawing, self._model.logits(hidden[torch.tensor(last_rows)]).numpy())

    def _batch(self, plan: Plan) -> Batch:
        size = self._memory.format.block_size
        tokens, positions, slots, offsets = list[int](), list[int](), list[int](), list[int]()
        spans = list[Span]()
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            spans.append(Span(len(tokens), len(tokens) + len(chunk.tokens), chunk.start, torch.tensor(chunk.slots)))
            tokens += chunk.tokens
            positions += range(chunk.start, end)
            slots += [chunk.slots[position // size] for position in range(chunk.start, end)]
            offsets += [position % size for position in range(chunk.start, end)]
        padding = [0] * max(MIN_ROWS - len(tokens), 0)
        return Batch(
            tokens=torch.tensor(tokens + padding),
            positions=torch.tensor(positions + padding),
            num_rows=len(tokens),
            slots=torch.tensor(slots),
            offsets=torch.tensor(offsets),
            spans=spans,
        )
