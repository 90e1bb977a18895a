"""Benchmarks of the sandbox room."""
