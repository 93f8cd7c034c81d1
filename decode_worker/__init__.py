"""The decode role: fills its pool from sources, computes tails, yields tokens."""
