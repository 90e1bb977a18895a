"""Attacks on rewards that really run: `rl redteam`."""
