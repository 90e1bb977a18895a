"""Checks before a run: facts are gathered once, in bounded time; rules are pure functions over (spec, facts)."""
