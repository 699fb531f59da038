"""How a service's process runs: lifecycle, health and metrics over HTTP, logs, --help."""
