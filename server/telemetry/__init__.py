"""What operators watch from outside: Prometheus metrics and OpenTelemetry spans of the control plane."""
