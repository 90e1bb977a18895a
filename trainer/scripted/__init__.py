"""The real proxy over a policy that reads from a script, as a process of its own: for checks of harnesses, without a model."""
