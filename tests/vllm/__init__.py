"""The third environment of the tests: vLLM's CPU build beside the trainer. It clashes with the sandbox room's packages."""
