"""What can be seen of a running fleet: the metric table, its pages and the log line. Sinks are injected."""
