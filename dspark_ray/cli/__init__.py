"""Floor 8: the `dspark-ray` command, one module per job. Heavy imports happen inside the commands."""
