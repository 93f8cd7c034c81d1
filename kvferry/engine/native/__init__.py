"""The decoder in C, and its loading."""
