"""Small runs of every family of methods, as configuration files: what is tried on run folders is tried on these."""

from pathlib import Path
from typing import Any

import image_runs
import numpy as np
import small_run
import yaml

LATE = {"delay": {"sigma": 1.0}, "participation": 0.7}
TEXT: dict[str, dict[str, Any]] = {
    "local": {"method": {"name": "local"}},
    "fedit": {},
    "fedmerge": {"method": {"name": "fedmerge", "num_models": 2}},
    "feddle": {"method": {"name": "feddle"}, "task": {"server": {"examples": 2}}, **LATE},
}
FAMILIES = (*TEXT, "images")


def write(folder: Path, names: tuple[str, ...] = FAMILIES) -> dict[str, Path]:
    """The configuration of each family below a folder, with the data and the base that it needs."""
    small, found = small_run.make(folder), {}
    for name in names:
        if name == "images":
            rng = np.random.default_rng(0)
            pixels = rng.integers(256, size=(60, 6, 6, 3), dtype=np.uint8)
            np.savez(folder / "a.npz", x_train=pixels[:45], y_train=np.arange(45) % 3, x_test=pixels[45:],
                     y_test=np.arange(15) % 3)  # fmt: skip
            tree = image_runs.configured(folder / "a.npz", "local", rounds=2)
        else:
            tree = small.tree(**{"rounds": 3, "local": {"steps": 1}, **TEXT[name]})
        found[name] = folder / f"{name}.yaml"
        found[name].write_text(yaml.safe_dump(tree))
    return found
