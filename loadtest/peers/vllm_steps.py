"""Times steps of vLLM's CPU build: offline, in one process, eager, float32. Run by vLLM's own interpreter, alone.

Usage: vllm_steps.py MODEL_DIR THREADS. One `LLMEngine.step` is a step. In one process vLLM binds no thread to a core whatever
VLLM_CPU_OMP_THREADS_BIND says, and computes on OMP_NUM_THREADS threads, by default one a core: THREADS sets it, and is checked.
No prefix is cached. Sequences of a decode batch hold the context's tokens and the few that were decoded since.
"""
# pyright: reportMissingImports=false

import itertools
import json
import os
import random
import statistics
import sys
import time

os.environ["OMP_NUM_THREADS"] = sys.argv[2]
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from vllm import LLM, SamplingParams

model_directory, num_threads = sys.argv[1], int(sys.argv[2])

CONTEXTS = (128, 1024)
BATCHES = (1, 8, 16)
PREFILL_REPEATS, DECODE_REPEATS = 3, 10
STEP_TOKENS = 2048
MAX_OUTPUT = 100
"""More than a sequence decodes while the others' prompts are computed and while steps are timed."""

numbers = itertools.count()


def add(engine, context):
    """A new request with a random prompt; its id."""
    request_id = str(next(numbers))
    prompt = {"prompt_token_ids": [random.randrange(100, 49_000) for _ in range(context)]}
    sampling = SamplingParams(max_tokens=MAX_OUTPUT, ignore_eos=True, temperature=0, detokenize=False)
    return engine.add_request(request_id, prompt, sampling) or request_id


def step(engine):
    """Seconds, and the ids of the requests that got a token."""
    began = time.perf_counter()
    outputs = engine.step()
    return time.perf_counter() - began, {output.request_id for output in outputs}


def abort(engine, request_ids):
    engine.abort_request(list(request_ids), internal=True)
    while engine.has_unfinished_requests():
        engine.step()


def prefill(engine, context):
    """A prompt of up to STEP_TOKENS is one step, which ends with its first token."""
    request_id = add(engine, context)
    seconds, given = step(engine)
    if not given:
        sys.exit(f"vLLM did not compute a prompt of {context} tokens in one step")
    abort(engine, [request_id])
    return seconds


def decode(engine, context, size):
    """Seconds of each step in which every sequence gets one token."""
    request_ids = [add(engine, context) for _ in range(size)]
    started = set()
    while len(started) < size:
        started |= step(engine)[1]
    step(engine)
    timed = [step(engine) for _ in range(DECODE_REPEATS)]
    if any(len(given) != size for _, given in timed):
        sys.exit(f"vLLM did not decode all of {size} sequences in each step")
    abort(engine, request_ids)
    return [seconds for seconds, _ in timed]


def say(workload, num_tokens, seconds):
    step_s = statistics.median(seconds)
    who = {"peer": "vllm", "threads": num_threads, "weights": "float32", "workload": workload}
    print(json.dumps({**who, "tok_s": round(num_tokens / step_s, 1), "step_ms": round(step_s * 1e3, 3)}), flush=True)


def measure(engine, context):
    prefill(engine, context)
    say(f"prefill_{context}", context, [prefill(engine, context) for _ in range(PREFILL_REPEATS)])
    for size in BATCHES:
        say(f"decode_c{context}_b{size}", size, decode(engine, context, size))


def main():
    llm = LLM(
        model_directory,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max(CONTEXTS) + MAX_OUTPUT + 1,
        max_num_seqs=32,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
    )
    if torch.get_num_threads() != num_threads:
        sys.exit(f"vLLM computes on {torch.get_num_threads()} threads, not {num_threads}")
    for context in CONTEXTS:
        measure(llm.llm_engine, context)


if __name__ == "__main__":
    main()
