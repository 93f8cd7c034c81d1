"""Block ids, the block pool, frames, and the fetch from one pool to another."""
