"""Evaluation: generation with each client's own adapter, scores, pictures and the report of a run."""
