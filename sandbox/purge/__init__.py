"""`rl purge`: take tasks that cannot be run or graded out of a task index, by the evidence of runs."""
