"""From a task to a rollout: groups, trials, the runner's client, admission, and the manager that verl drives."""
