"""Thousands of real trials in a row, with real kills of agents, verifiers and runners: `make soak`."""
