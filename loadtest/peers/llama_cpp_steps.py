"""Times steps of llama.cpp through the C interface that llama-cpp-python binds. Run by llama.cpp's own interpreter, alone.

Usage: llama_cpp_steps.py MODEL.gguf [unified|split]. One `llama_decode` call over one batch of sequences is a step, on one
thread; flash attention as llama.cpp chooses, keys and values in float16. `unified`: all sequences share one buffer of keys and
values, and each attends over all of it under a mask; `split` (llama.cpp's own default): a buffer for each sequence.
"""
# pyright: reportMissingImports=false

import ctypes
import json
import random
import statistics
import sys
import time

import llama_cpp

CONTEXTS = (128, 1024)
BATCHES = (1, 8, 16)
PREFILL_REPEATS, DECODE_REPEATS = 3, 10

path, kv = sys.argv[1], (sys.argv[2:] or ["split"])[0]
weights = path.removesuffix(".gguf").rsplit("-", 1)[-1]
quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Steps:
    """Room for `max(BATCHES)` sequences that grow up to one token more than `context`."""

    def __init__(self, model, context):
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = max(BATCHES)
        params.n_ctx = (context + 64) * max(BATCHES)
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = kv == "unified"
        self.state = llama_cpp.llama_init_from_model(model, params)
        self.memory = llama_cpp.llama_get_memory(self.state)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.context = context

    def prefill(self, number):
        """Seconds for a new prompt of sequence `number`, with the logits of its last token."""
        llama_cpp.llama_memory_seq_rm(self.memory, number, -1, -1)
        last = self.context - 1
        return self._decode([(position, number, position == last) for position in range(self.context)])

    def decode(self, size):
        """Seconds for one token more of each of `size` sequences, which hold `context` tokens before and after."""
        seconds = self._decode([(self.context, number, True) for number in range(size)])
        for number in range(size):
            llama_cpp.llama_memory_seq_rm(self.memory, number, self.context, -1)
        return seconds

    def _decode(self, rows):
        batch = self.batch
        batch.n_tokens = len(rows)
        for row, (position, number, wants_logits) in enumerate(rows):
            batch.token[row], batch.pos[row] = random.randrange(100, 49_000), position
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, number, wants_logits
        began = time.perf_counter()
        status = llama_cpp.llama_decode(self.state, batch)
        llama_cpp.llama_synchronize(self.state)
        if status:
            sys.exit(f"llama_decode returned {status} for {len(rows)} tokens")
        return time.perf_counter() - began


def say(workload, num_tokens, seconds):
    step_s = statistics.median(seconds)
    who = {"peer": "llama.cpp", "threads": 1, "weights": weights, "workload": workload}
    print(json.dumps({**who, "tok_s": round(num_tokens / step_s, 1), "step_ms": round(step_s * 1e3, 3)}), flush=True)


def measure(model, context):
    steps = Steps(model, context)
    steps.prefill(0)
    say(f"prefill_{context}", context, [steps.prefill(0) for _ in range(PREFILL_REPEATS)])
    num_held = 1
    for size in BATCHES:
        for number in range(num_held, size):
            steps.prefill(number)
        num_held = size
        steps.decode(size)
        say(f"decode_c{context}_b{size}", size, [steps.decode(size) for _ in range(DECODE_REPEATS)])
    llama_cpp.llama_free(steps.state)


llama_cpp.llama_backend_init()
llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
loaded = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
if not loaded:
    sys.exit(f"llama.cpp cannot read {path}")
for length in CONTEXTS:
    measure(loaded, length)
