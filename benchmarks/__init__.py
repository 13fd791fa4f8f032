"""Benchmarks, run from a checkout's root: ``python -m benchmarks.NAME`` or ``verl-adaptive bench NAME``."""
