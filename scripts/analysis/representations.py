"""Where personal models put their clients' test pictures: the features that the head reads, in two dimensions by t-SNE
(FedMoE, Figure 5).

All clients' features together are one embedding, so they must be equally many. A colour and mark for each class, and
at each client's pictures of a class the client's number. Distances between groups say little in t-SNE; whether groups
are apart does. Writes RUN/analysis/representations.csv and .png. Needs scikit-learn: in the clone,
pip install -e '.[analysis]'.

    python scripts/analysis/representations.py RUN --examples 100
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from finished import Scored, tested
from matplotlib.figure import Figure
from results import plain_errors, write_rows

from llm_fed.basics.errors import UserError, install
from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.style import INK, MARKERS, PAGE, PALETTE, legend, plain_axes, save
from llm_fed.runs.reading import read_config

MAX_GROUPS = 60  # more groups of a client and class than this are not numbered


def features(scored: Mapping[str, Scored]) -> np.ndarray:
    """(pictures of all clients, H).

    Raises:
        UserError: clients whose models have differently many features.
    """
    widths = {client: own.answer.features.shape[1] for client, own in scored.items()}
    if len(set(widths.values())) > 1:
        raise UserError(
            f"the clients' models have {sorted(set(widths.values()))} features; one embedding needs equal numbers"
        )
    return torch.cat([own.answer.features for own in scored.values()]).numpy()


def embed(points: np.ndarray, seed: int) -> np.ndarray:
    """(N, 2) by t-SNE (van der Maaten and Hinton 2008), begun at the principal components.

    Raises:
        UserError: scikit-learn is not installed, or too few points.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise UserError(f"t-SNE needs scikit-learn, which is not installed; {install('analysis')}") from error
    if len(points) < 4:
        raise UserError(f"{len(points)} pictures are too few for t-SNE; raise --examples")
    return TSNE(perplexity=min(30.0, (len(points) - 1) / 3), init="pca", random_state=seed).fit_transform(points)


def draw(path: Path, places: np.ndarray, owners: np.ndarray, classes: np.ndarray, labels: Sequence[str]) -> None:
    """Points (N, 2) of clients by number and of classes by label, both (N,)."""
    figure = Figure(figsize=(6.0, 6.4), layout="constrained", facecolor=PAGE[False])
    axes = plain_axes(figure, (1, 1, 1))
    for label in np.unique(classes).tolist():
        x, y = places[classes == label].T
        colour, marker = PALETTE[label % len(PALETTE)], MARKERS[label % len(MARKERS)]
        axes.scatter(x, y, s=14, color=colour, marker=marker, alpha=0.75, linewidth=0, label=labels[label])
    groups = np.unique(np.stack([owners, classes], 1), axis=0).tolist()
    for owner, label in groups if len(groups) <= MAX_GROUPS else ():
        x, y = np.median(places[(owners == owner) & (classes == label)], axis=0)
        box = {"boxstyle": "circle,pad=0.15", "facecolor": PAGE[False], "edgecolor": INK[False], "linewidth": 0.6}
        axes.text(x, y, str(owner), ha="center", va="center", fontsize=7, color=INK[False], bbox=box)
    axes.set(xticks=[], yticks=[], xlabel="number in a circle: the client")
    axes.grid(False)
    legend(figure, columns=5)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--examples", type=int, default=100, help="most test pictures per client")
    given = parser.parse_args()
    with plain_errors(parser):
        scored, labels = tested(given.run, given.examples)
        places = embed(features(scored), read_config(given.run).seed)
        owners = np.repeat(np.arange(len(scored)), [len(own.pictures) for own in scored.values()])
        classes = np.array([picture.label for own in scored.values() for picture in own.pictures])
        clients = list(scored)
        rows = [
            (clients[owner], labels[label], *place)
            for owner, label, place in zip(owners, classes, places.tolist(), strict=True)
        ]
        folder = write_rows(given.run / "analysis" / "representations.csv", ("client", "class", "x", "y"), rows)
        draw(folder / "representations.png", places, owners, classes, labels)


if __name__ == "__main__":
    with lasting_streams():
        main()
