"""What the roles of kvferry share: values, block pool, hand-off, engine, text. Imports no role."""

__version__ = "0.1.0"
