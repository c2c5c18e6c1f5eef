"""What an operator sees: log lines, Prometheus metrics (under vLLM's names too), and OpenTelemetry spans."""
