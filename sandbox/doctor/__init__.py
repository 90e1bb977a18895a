"""`rl doctor`: what long runs leave behind on a machine, and what makes its sandboxes slow."""
