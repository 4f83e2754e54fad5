"""The battery on every method of llm_fed: their settings for a run of three rounds, and their golden curves.

A method needs a line in GOLDEN (`python tests/support/battery.py` prints it; see `tests/methods/test_battery.py`), and
one in SETTINGS only where its defaults do not suit a run of three rounds. The checks and the federations are those of
`llm_fed.testing`.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llm_fed import methods
from llm_fed.testing import federation
from llm_fed.testing.battery import Slack
from llm_fed.testing.federation import ADAPTERS, MODELS, Outcome, Setup

OF_PICTURES = " of pictures"  # ends the names of federations of whole image models
SETTINGS: dict[str, dict[str, Any]] = {
    "fedlora": {"personal_share": 0.25},
    "fedprox": {"mu": 1.0},
    "fedadagrad": {"server_lr": 0.03},
    "fedadam": {"server_lr": 0.03},
    "fedyogi": {"server_lr": 0.03},
    "pfedme": {"strength": 2.0, "local_rounds": 2, "inner_steps": 2, "outer_lr": 0.3},
    "feddpa": {"anchors": 2},
    "fedem": {"num_models": 2},
    "ifca": {"num_models": 2, "warmup_rounds": 1},
    "cfl": {"stationary": 1.0, "incongruent": 0.1},
    "fl-hc": {"rounds_before": 2},
    "fedmerge": {"num_models": 3, "weight_lr": 0.5},
    "fedmerge of pictures": {"num_models": 3},
    "fedmerge-fixed": {"num_models": 3, "models_per_client": 2},
    "fedbuff": {"buffer": 2},
    "ca2fl": {"buffer": 2},
    "fed+ft": {"server_lr": 0.01},
    "feddf": {"server_lr": 0.01},
    "feddle": {"search_lr": 0.1},
}
GOLDEN: dict[str, list[float]] = {
    "local": [4.17255, 3.73894, 3.15488],
    "fedit": [4.17255, 3.87809, 3.62014],
    "fedlora": [4.17255, 3.87809, 3.62014, 3.28312],
    "fedprox": [4.18902, 3.87196, 3.62844],
    "scaffold": [4.24407, 3.86776, 3.4752],
    "feddyn": [4.17288, 3.81044, 3.30614],
    "fedavgm": [4.17255, 3.87809, 3.62563],
    "fedadagrad": [4.17255, 4.10638, 3.86766],
    "fedadam": [4.17255, 4.10845, 3.78495],
    "fedyogi": [4.17255, 4.10847, 3.78631],
    "ditto": [4.24659, 3.7442, 3.27978],
    "pfedme": [4.2124, 3.98015, 3.50628],
    "rolora": [4.20507, 4.05093, 3.65704],
    "fedrot-lora": [4.17255, 3.87809, 3.63712],
    "fedsvd": [4.20507, 4.04985, 3.70229],
    "ffa": [4.20507, 4.07159, 3.84114],
    "fedsa": [4.17255, 3.79624, 3.38421],
    "feddpa": [4.26367, 3.95714, 3.44987],
    "fedalt": [4.26821, 3.81576, 3.19439],
    "hetlora": [4.17257, 3.89894, 3.60373],
    "flexlora": [4.17255, 3.95292, 3.49439],
    "flora": [4.26501, 4.0158, 3.8155],
    "fedex-lora": [4.17255, 3.81239, 3.52455],
    "pfedmoe": [4.19513, 3.73084, 3.17485],
    "fedem": [4.19513, 4.12342, 3.59871],
    "ifca": [4.17683, 3.72599, 3.29704],
    "cfl": [4.17255, 3.69783, 3.09366],
    "fl-hc": [4.17255, 3.87809, 3.28009],
    "fedmerge": [4.17736, 3.96176, 3.5027],
    "fedmerge-fixed": [4.12678, 3.85432, 3.36166],
    "fedasync": [4.17255, 4.00063, 3.60656],
    "fedbuff": [4.17255, 3.92626, 3.43734],
    "ca2fl": [4.17255, 3.92626, 3.42719],
    "fed+ft": [4.17255, 3.76244, 3.32709],
    "hfcl": [4.17255, 3.95755, 3.53962],
    "feddf": [4.17255, 3.89274, 3.66277],
    "feddle": [4.17255, 3.84059, 3.3978],
    "local of pictures": [1.02988, 0.397611, 0.231138],
    "fedit of pictures": [1.02988, 0.726773, 0.607449],
    "fedlora of pictures": [1.02988, 0.726773, 0.607449, 0.48634],
    "fedprox of pictures": [1.03117, 0.743536, 0.648157],
    "scaffold of pictures": [0.960456, 0.856168, 0.886418],
    "feddyn of pictures": [1.02985, 0.613022, 0.549986],
    "fedavgm of pictures": [1.02988, 0.726773, 0.619568],
    "fedadagrad of pictures": [1.02988, 0.757617, 0.676029],
    "fedadam of pictures": [1.02988, 0.692136, 0.620693],
    "fedyogi of pictures": [1.02988, 0.692615, 0.632846],
    "ditto of pictures": [1.00688, 0.520633, 0.407354],
    "pfedme of pictures": [0.934727, 0.724264, 0.633079],
    "fedbn of pictures": [1.02988, 0.706019, 0.580236],
    "fedmoe of pictures": [1.05193, 0.438182, 0.212376],
    "lg-fedavg of pictures": [1.02988, 0.535666, 0.428366],
    "fd of pictures": [1.02988, 0.70657, 0.537344],
    "fedproto of pictures": [1.02988, 0.824846, 0.606829],
    "fml of pictures": [1.11952, 0.747436, 0.687723],
    "fedkd of pictures": [2.29868, 1.7768, 1.65082],
    "fedapen of pictures": [3.80134, 2.00772, 1.66068],
    "pfedmoe of pictures": [1.05193, 0.438182, 0.212376],
    "fedem of pictures": [1.05467, 0.740306, 0.638436],
    "ifca of pictures": [1.02334, 0.689332, 0.480341],
    "cfl of pictures": [1.02988, 0.465683, 0.265042],
    "fl-hc of pictures": [1.02988, 0.726773, 0.335043],
    "fedmerge of pictures": [1.05046, 0.730669, 0.602172],
    "fedmerge-fixed of pictures": [1.03296, 0.568307, 0.395243],
    "fedasync of pictures": [1.02988, 0.758655, 0.672325],
    "fedbuff of pictures": [1.02988, 0.759184, 0.578278],
    "ca2fl of pictures": [1.02988, 0.759184, 0.559716],
    "fed+ft of pictures": [1.02988, 0.90694, 0.856737],
    "hfcl of pictures": [1.02988, 0.770936, 0.660551],
    "feddf of pictures": [1.02988, 1.09137, 0.98939],
    "feddle of pictures": [1.02988, 0.720825, 0.602992],
}
# The checks of federations whose ranks differ.
OF_UNEQUAL = (
    "killed in every round but the first and continued is uninterrupted", "all clients at once is 1 at a time",
    "the order of uploads does not matter", "personalize only computes",
)  # fmt: skip
# Those that start from other runs have no rounds, and a battery of their own in test_potara.py. The clients of `center`
# and `pooled` do nothing: see test_server_methods.py.
IDLE = ("center", "pooled")
FEDERATED = [name for name, kind in methods.METHODS.items() if not kind.whole_models and name not in IDLE]
WHOLE_MODELS = [
    name + OF_PICTURES
    for name in methods.METHODS
    if name not in IDLE and not methods.build({"name": name}).adapters_only
]
# They add up logits, which are float32; they send as many factors as a round's updates need, in round 1 none, or A and
# B in turn.
SLACK = {
    "feddf": Slack(order=1e-6), "fedkd": Slack(bytes=0.1), "fedkd of pictures": Slack(bytes=0.1),
    "flora": Slack(bytes=1.0), "fedex-lora": Slack(bytes=1.0), "rolora": Slack(bytes=0.3, rounding=1e-3),
}  # fmt: skip


# How the clients of methods train that do not take every optimizer.
LOCAL = {
    "scaffold": ["local.optimizer=sgd", "local.lr=0.5", "local.lr_end=0.5"],
    "scaffold of pictures": ["local.optimizer=sgd", "local.lr=0.1", "local.lr_end=0.1"],
}


@cache
def setup_of(name: str) -> Setup:
    return (MODELS if name.endswith(OF_PICTURES) else ADAPTERS).training(LOCAL.get(name, ()))


def settings_of(name: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The method of a name of this file; with other settings than those here."""
    plain = name.removesuffix(OF_PICTURES)
    own = SETTINGS.get(name, SETTINGS.get(plain, {}))
    return {"name": plain, **(own if settings is None else settings)}


def go(name: str, folder: Path, *, settings: Mapping[str, Any] | None = None, **options: Any) -> Outcome:
    """Run, or continue, the federation of a name of this file (`federation.go`)."""
    return federation.go(settings_of(name, settings), setup_of(name), folder, **options)


if __name__ == "__main__":
    import sys
    from tempfile import TemporaryDirectory

    for method in sys.argv[1:] or (*FEDERATED, *WHOLE_MODELS):
        with TemporaryDirectory() as folder:
            print(f'    "{method}": {go(method, Path(folder)).curve()},')
