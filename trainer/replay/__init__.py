"""`rl replay`: recorded harness traffic through the real proxy and capture."""
