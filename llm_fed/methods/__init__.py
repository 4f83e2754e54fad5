"""The methods by name: one paper, one file. To add one, write its file and a line in this table."""

from __future__ import annotations

import dataclasses
from typing import Any

from llm_fed.configfile import check_keys
from llm_fed.errors import UserError, require
from llm_fed.method import Method
from llm_fed.methods.ca2fl import CA2FL
from llm_fed.methods.fd import FD
from llm_fed.methods.fedalt import FedALT
from llm_fed.methods.fedapen import FedAPEN
from llm_fed.methods.fedasync import FedAsync
from llm_fed.methods.fedbn import FedBN
from llm_fed.methods.fedbuff import FedBuff
from llm_fed.methods.feddf import FedDF
from llm_fed.methods.feddle import Feddle
from llm_fed.methods.feddpa import FedDPA
from llm_fed.methods.fedem import FedEM
from llm_fed.methods.fedft import Center, FedFT
from llm_fed.methods.fedit import FedIT, FedLoRA
from llm_fed.methods.fedkd import FedKD
from llm_fed.methods.fedmerge import FedMerge, FedMergeFixed
from llm_fed.methods.fedmoe import FedMoE
from llm_fed.methods.fedproto import FedProto
from llm_fed.methods.fedsa import FedSA
from llm_fed.methods.ffa import FFA
from llm_fed.methods.fisher_merging import FisherMerging
from llm_fed.methods.fml import FML
from llm_fed.methods.hfcl import HFCL
from llm_fed.methods.ifca import IFCA
from llm_fed.methods.interpolation import Grid, Mean
from llm_fed.methods.lg_fedavg import LGFedAvg
from llm_fed.methods.local import Local
from llm_fed.methods.pfedmoe import PFedMoE
from llm_fed.methods.potara import Potara
from llm_fed.settings import coerce, hints, range_of

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "fedit": FedIT,
    "fedlora": FedLoRA,
    "ffa": FFA,
    "fedsa": FedSA,
    "feddpa": FedDPA,
    "fedalt": FedALT,
    "fedbn": FedBN,
    "fedmoe": FedMoE,
    "lg-fedavg": LGFedAvg,
    "fd": FD,
    "fedproto": FedProto,
    "fml": FML,
    "fedkd": FedKD,
    "fedapen": FedAPEN,
    "pfedmoe": PFedMoE,
    "fedem": FedEM,
    "ifca": IFCA,
    "fedmerge": FedMerge,
    "fedmerge-fixed": FedMergeFixed,
    "fedasync": FedAsync,
    "fedbuff": FedBuff,
    "ca2fl": CA2FL,
    "center": Center,
    "fed+ft": FedFT,
    "hfcl": HFCL,
    "feddf": FedDF,
    "feddle": Feddle,
    "potara": Potara,
    "fisher-merging": FisherMerging,
    "mean": Mean,
    "grid": Grid,
}

ALIASES = {"standalone": "local", "fedavg": "fedit", "fedavg+": "fedlora", "fisher": "fisher-merging"}


def build(settings: dict[str, Any]) -> Method:
    """The method that `{name: ..., hyper-parameter: value, ...}` describes.

    Raises:
        UserError: an unknown name or hyper-parameter (the closest one is named), or a value that the method refuses.
    """
    name = str(settings["name"])
    require("method", name, [*METHODS, *ALIASES])
    kind = METHODS[ALIASES.get(name, name)]
    fields = hints(kind)
    given = {key: value for key, value in settings.items() if key != "name"}
    for key in given:
        owners = [other for other, its in METHODS.items() if key in {f.name for f in dataclasses.fields(its)}]
        if key not in fields and owners:
            its = ", ".join(fields) or "no settings"
            raise UserError(f"method.{key} is a setting of {', '.join(owners)}; {name} takes {its}")
    check_keys(given, list(fields), "method.")
    return kind(**{key: coerce(value, fields[key], f"method.{key}") for key, value in given.items()})


def canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """The shortest settings of the same method: no alias, and no hyper-parameter that has its default value."""
    method = build(settings)
    name = next(name for name, kind in METHODS.items() if kind is type(method))
    values = {f.name: (getattr(method, f.name), f.default) for f in dataclasses.fields(method)}
    return {"name": name, **{key: value for key, (value, default) in values.items() if value != default}}


def describe() -> list[dict[str, Any]]:
    """Every method with its paper, and the defaults and ranges of its hyper-parameters, for `llm-fed methods`."""
    return [
        {
            "name": name,
            "aliases": [alias for alias, target in ALIASES.items() if target == name],
            "paper": kind.paper,
            "settings": {f.name: f.default for f in dataclasses.fields(kind)},
            "ranges": {key: text for key, hint in hints(kind).items() if (text := range_of(hint))},
        }
        for name, kind in METHODS.items()
    ]
