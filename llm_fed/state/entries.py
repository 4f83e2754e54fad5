"""What an entry of an adapter's state is, as its name says: the A or the B of a layer, its magnitudes, a router, or a
part of a module that is trained whole."""

from __future__ import annotations

FACTORS = ("lora_A", "lora_B")  # what the names of an adapter's entries end with
MAGNITUDE = "lora_magnitude_vector"  # of DoRA, as PEFT calls it: the length of each output's weights
HEAD = "head"  # beside them: the entries of modules that are trained whole


def pair(module: str, expert: str) -> tuple[str, str]:
    """The names of an expert's two entries on a layer."""
    place = f"{module}.{expert}" if expert else module
    first, second = FACTORS
    return f"{place}.{first}", f"{place}.{second}"


def factor_of(name: str) -> str:
    """Which of FACTORS an entry is, MAGNITUDE, or HEAD."""
    last = name.rpartition(".")[2]
    return last if last in (*FACTORS, MAGNITUDE) else HEAD


def magnitude(module: str) -> str:
    """The name of a layer's magnitudes."""
    return f"{module}.{MAGNITUDE}"


def router(module: str) -> str:
    """The name of a layer's router."""
    return f"{module}.router"
