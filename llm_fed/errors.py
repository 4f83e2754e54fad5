"""Errors that llm_fed raises on purpose; the command line prints them without a traceback."""


class UserError(Exception):
    """A mistake in what the user gave (configuration, data, paths): what was got, where, what to do. Exit code 2."""


class RunError(Exception):
    """A run that cannot go on (disk full, all checkpoints corrupt, no client left). Exit code 1."""


class ClientError(Exception):
    """One client's work failed (non-finite loss, no usable example); the round goes on without it."""
