"""Times steps of plain transformers: eager, float32, its own dynamic cache. Run by transformers' own interpreter, alone.

Usage: transformers_steps.py MODEL_DIR. One call of the model is a step, on one thread. A decode batch's cache is one prompt's,
copied for each sequence: the work is the same as with a prompt each, and they need not all be computed first.
"""

import json
import os
import statistics
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM

CONTEXTS = (128, 1024)
BATCHES = (1, 8, 16)
PREFILL_REPEATS, DECODE_REPEATS = 3, 10


def random_ids(size, length):
    return torch.randint(100, 49_000, (size, length))


def prefill(model, context):
    """A new prompt's cache."""
    return model(random_ids(1, context), logits_to_keep=1, use_cache=True).past_key_values


def decode(model, cache, size):
    """One token more of each sequence; the caller crops it again."""
    model(random_ids(size, 1), past_key_values=cache, use_cache=True)


def timed(work, *arguments):
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def timed_decode(model, cache, size):
    """The sequences hold as many tokens after it as before."""
    seconds = timed(decode, model, cache, size)
    cache.crop(-1)
    return seconds


def say(workload, num_tokens, seconds):
    step_s = statistics.median(seconds)
    who = {"peer": "transformers", "threads": 1, "weights": "float32", "workload": workload}
    print(json.dumps({**who, "tok_s": round(num_tokens / step_s, 1), "step_ms": round(step_s * 1e3, 3)}), flush=True)


def measure(model, context):
    prefill(model, context)
    say(f"prefill_{context}", context, [timed(prefill, model, context) for _ in range(PREFILL_REPEATS)])
    for size in BATCHES:
        cache = prefill(model, context)
        cache.batch_repeat_interleave(size)
        timed_decode(model, cache, size)
        seconds = [timed_decode(model, cache, size) for _ in range(DECODE_REPEATS)]
        say(f"decode_c{context}_b{size}", size, seconds)


torch.set_num_threads(1)
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.inference_mode():
    for length in CONTEXTS:
        measure(loaded, length)
