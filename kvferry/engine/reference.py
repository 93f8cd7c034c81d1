"""The reference: the same checkpoint through transformers' own modules and cache, one sequence, greedy, float32.

Shares no code with the engine. Used by comparisons and tests only.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


class Reference:
    def __init__(self, directory: Path):
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, tokens: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """The next `num_tokens` ids, and at each step the gap between the two best logits."""
        answer, gaps, cache = list[int](), list[float](), None
        pending = torch.tensor([tokens])
        for _ in range(num_tokens):
            output = self._model(pending, cache=cache, use_cache=True, logits_to_keep=1)
            cache = output.cache
            best = output.logits[0, -1].topk(2)
            answer.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            pending = best.indices[:1][None]
        return answer, gaps

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary]."""
        return self._model(torch.tensor([tokens])).logits[0]
