"""`rl regrade`: another verdict on archived diffs, without the agent."""
