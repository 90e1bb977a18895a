"""The trial runner: an HTTP service that executes trials with Harbor and decides their outcomes."""
