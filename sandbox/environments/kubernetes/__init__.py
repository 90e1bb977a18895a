"""Sandboxes that are pods of a Kubernetes cluster, one per agent and one per verifier."""
