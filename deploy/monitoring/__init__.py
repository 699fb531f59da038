"""What an operator watches: Grafana's boards, Prometheus's alerts, and the metrics of a NATS server."""
