"""Finding faults before a run: in code, configurations, data, checkpoints and logs."""
