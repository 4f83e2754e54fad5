"""The run folder: configuration, metrics, checkpoints, and what is shown while a run goes on."""
