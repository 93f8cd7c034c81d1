"""Chat template, tokeniser, incremental decoding and stop strings. No torch."""
