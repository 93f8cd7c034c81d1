"""The prefill role: turns tokens into whole blocks and serves them. Knows nothing of sampling or text."""
