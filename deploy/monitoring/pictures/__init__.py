"""Pictures of the dashboards for the docs, drawn from what a Prometheus answers: Grafana itself is not needed."""
