"""Plans and runs: what a spec amounts to, and where a run stands."""
