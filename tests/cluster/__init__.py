"""A real one-node Kubernetes cluster for tests (`make test-cluster`), in namespaces of its own."""
