"""Floor 5: the processes and what passes between them. Ray is imported only here and in `deployments`."""
