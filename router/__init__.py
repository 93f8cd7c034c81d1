"""The router role: text to tokens, placement, journal, answers. Imports no torch."""
