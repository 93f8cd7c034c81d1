"""Load tests and comparisons: clients of a running service. Measures what a client sees."""
