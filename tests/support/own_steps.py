"""FedLoRA whose clients train some rounds together, and then take the steps of some more alone."""

from typing import Any


def alone(rounds: int = 1, *, after: int, name: str = "fedlora", **settings: Any) -> dict[str, Any]:
    """The sections `rounds` and `method` of a run of `after` rounds together, and of the steps of `rounds` alone."""
    whole = after + rounds
    return {"rounds": whole, "method": {"name": name, "personal_share": rounds / whole, **settings}}
