"""The methods and mergers by name: one paper, one file. To add one, write its file and a line in these tables.

One from outside needs no line: a method is named by its class, a merger by its function, or both by an entry point of
their package (`llm_fed.settings.plugins`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from llm_fed.basics.errors import UserError, lookup
from llm_fed.mergers.dare import dare, dare_of
from llm_fed.mergers.fisher_merging import fisher_merging
from llm_fed.mergers.interpolation import grid, mean
from llm_fed.mergers.karcher import karcher
from llm_fed.mergers.linear import linear, svd
from llm_fed.mergers.potara import potara
from llm_fed.mergers.slerp import slerp, slerp_of
from llm_fed.mergers.task_arithmetic import task_arithmetic
from llm_fed.mergers.ties import ties, ties_of
from llm_fed.method import Json, Method
from llm_fed.method.merge import Merge, kind_of
from llm_fed.methods.ca2fl import CA2FL
from llm_fed.methods.cfl import CFL
from llm_fed.methods.ditto import Ditto
from llm_fed.methods.fd import FD
from llm_fed.methods.fedalt import FedALT
from llm_fed.methods.fedapen import FedAPEN
from llm_fed.methods.fedasync import FedAsync
from llm_fed.methods.fedbn import FedBN
from llm_fed.methods.fedbuff import FedBuff
from llm_fed.methods.feddf import FedDF
from llm_fed.methods.feddle import Feddle
from llm_fed.methods.feddpa import FedDPA
from llm_fed.methods.feddyn import FedDyn
from llm_fed.methods.fedem import FedEM
from llm_fed.methods.fedex_lora import FedExLoRA
from llm_fed.methods.fedft import Center, FedFT
from llm_fed.methods.fedit import FedIT, FedLoRA
from llm_fed.methods.fedkd import FedKD
from llm_fed.methods.fedmerge import FedMerge, FedMergeFixed
from llm_fed.methods.fedmoe import FedMoE
from llm_fed.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from llm_fed.methods.fedproto import FedProto
from llm_fed.methods.fedprox import FedProx
from llm_fed.methods.fedrot_lora import FedRotLoRA
from llm_fed.methods.fedsa import FedSA
from llm_fed.methods.fedsvd import FedSVD
from llm_fed.methods.ffa import FFA
from llm_fed.methods.fl_hc import FLHC
from llm_fed.methods.flexlora import FlexLoRA
from llm_fed.methods.flora import FLoRA
from llm_fed.methods.fml import FML
from llm_fed.methods.hetlora import HetLoRA
from llm_fed.methods.hfcl import HFCL
from llm_fed.methods.ifca import IFCA
from llm_fed.methods.lg_fedavg import LGFedAvg
from llm_fed.methods.local import Local
from llm_fed.methods.pfedme import PFedMe
from llm_fed.methods.pfedmoe import PFedMoE
from llm_fed.methods.pooled import Pooled
from llm_fed.methods.rolora import RoLoRA
from llm_fed.methods.scaffold import Scaffold
from llm_fed.settings import PLAIN, coerce, hints, objects, plugins, range_of, takes_plain
from llm_fed.settings.configfile import check_keys
from llm_fed.state import State

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "pooled": Pooled,
    "fedit": FedIT,
    "fedlora": FedLoRA,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "ditto": Ditto,
    "pfedme": PFedMe,
    "ffa": FFA,
    "fedsa": FedSA,
    "feddpa": FedDPA,
    "fedalt": FedALT,
    "rolora": RoLoRA,
    "fedrot-lora": FedRotLoRA,
    "fedsvd": FedSVD,
    "hetlora": HetLoRA,
    "flexlora": FlexLoRA,
    "flora": FLoRA,
    "fedex-lora": FedExLoRA,
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
    "cfl": CFL,
    "fl-hc": FLHC,
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
}
MERGERS: dict[str, type[Merge]] = {
    "potara": kind_of(potara),
    "fisher-merging": kind_of(fisher_merging),
    "mean": kind_of(mean),
    "grid": kind_of(grid),
    "task-arithmetic": kind_of(task_arithmetic),
    "ties": kind_of(ties),
    "dare": kind_of(dare),
    "slerp": kind_of(slerp),
}
# Of any number of adapters without roles and their weights: the merged one, and the share that a lower rank loses.
FOLDER_MERGERS: dict[str, Callable[..., tuple[State, float]]] = {
    "linear": linear,
    "svd": svd,
    "ties": ties_of,
    "dare": dare_of,
    "karcher": karcher,
    "slerp": slerp_of,
}

ALIASES = {"standalone": "local", "fedavg": "fedit", "fedavg+": "fedlora", "fisher": "fisher-merging"}
BUILTIN: dict[str, type[Method]] = {**METHODS, **MERGERS}
NAMES = (*BUILTIN, *ALIASES)


def find(name: str) -> type[Method]:
    """The class that a name stands for: of these tables, or from outside (`plugins.find`). UserError: there is none, or
    it is no method as described in CONTRIBUTING.md."""
    if name in BUILTIN or name in ALIASES:
        return BUILTIN[ALIASES.get(name, name)]
    kind = plugins.find("method.name", name, plugins.METHODS, NAMES)
    kind = type(kind) if isinstance(kind, Method) else kind_of(kind)
    _check(f"method.name={name!r}", kind, is_object=objects.is_object(name))
    return kind


def merger(name: str) -> type[Merge]:
    """The merger of this name, of the table or from outside. UserError: there is none, or it has rounds."""
    mergers = {alias: MERGERS[target] for alias, target in ALIASES.items() if target in MERGERS} | MERGERS
    outside = ":" in name or name in plugins.names(plugins.METHODS)
    kind = find(name) if outside else lookup("merge", name, mergers)
    if not issubclass(kind, Merge):
        raise UserError(f"merge={name!r} is a method with rounds, which llm-fed run trains")
    return kind


def build(settings: Mapping[str, Json]) -> Method:
    """The method that `{name: ..., hyper-parameter: value, ...}` describes. UserError: an unknown name or
    hyper-parameter (the closest one is named), or a value that the method refuses."""
    name = str(settings["name"])
    kind = find(name)
    if objects.is_object(name) and isinstance(given := objects.find("method.name", name), Method):
        return given
    fields = fields_of(kind)
    given = {key: value for key, value in settings.items() if key != "name"}
    for key in given:
        owners = [other for other, other_kind in BUILTIN.items() if key in fields_of(other_kind)]
        if key not in fields and owners:
            settable = ", ".join(fields) or "no settings"
            raise UserError(f"method.{key} is a setting of {', '.join(owners)}; {name} takes {settable}")
    check_keys(given, list(fields), "method.")
    if lacking := [key for key in fields if key not in defaults_of(kind) and key not in given]:
        raise UserError(f"method.{lacking[0]} has no default in {name}; give method.{lacking[0]}=...")
    try:
        return kind(**{key: coerce(value, fields[key], f"method.{key}") for key, value in given.items()})
    except ValueError as error:  # Python's own word for a value out of range, which a method from outside may use
        raise UserError(f"{name} refuses its settings: {error}") from error


def canonical(settings: Mapping[str, Json]) -> dict[str, Json]:
    """The shortest settings of the same method: no alias, and no hyper-parameter that has its default value."""
    method = build(settings)
    kind = type(method)
    name = next((name for name, other in BUILTIN.items() if other is kind), None) or str(settings["name"])
    if not objects.is_object(name) and name not in BUILTIN:
        name = plugins.path_of(kind)
    values, defaults = asdict(method), defaults_of(kind)
    own = {key: values[key] for key in fields_of(kind) if key not in defaults or values[key] != defaults[key]}
    return {"name": name, **own}


def builtin() -> list[dict[str, Any]]:
    """Every method and merger of llm_fed with its paper, and the defaults and ranges of its hyper-parameters."""
    return [_described(name, kind) for name, kind in BUILTIN.items()]


def outside() -> list[dict[str, Any]]:
    """Every method of installed packages, described like those of `builtin`, or what is wrong with it."""
    return list(plugins.describe(plugins.METHODS, NAMES, lambda name: _described(name, find(name))))


def _described(name: str, kind: type[Method]) -> dict[str, Any]:
    fields, defaults = fields_of(kind), defaults_of(kind)
    ranges = {key: range_of(hint) for key, hint in fields.items()}
    return {
        "name": name,
        "aliases": [alias for alias, target in ALIASES.items() if target == name],
        "paper": kind.paper,
        "settings": {key: defaults.get(key, "(must be given)") for key in fields},
        "ranges": {key: text for key, text in ranges.items() if text and not text.startswith("finite")},
    }


def fields_of(kind: type[Method]) -> dict[str, Any]:
    """The types of the fields that are settings, by name, with their ranges (`settings.hints`)."""
    types = hints(kind)
    return {field.name: types[field.name] for field in fields(kind) if field.init}


def defaults_of(kind: type[Method]) -> dict[str, Any]:
    """The values that settings have by themselves; those are missing that must be given."""
    own = [field for field in fields(kind) if field.init]
    made = {field.name: field.default_factory() for field in own if field.default_factory is not MISSING}
    return {field.name: field.default for field in own if field.default is not MISSING} | made


def _check(where: str, candidate: Any, *, is_object: bool = False) -> None:
    """Refuse what is no method, or one whose fields are no settings. UserError: what is wrong, and how it is written.
    `where`: who names it, for messages. `is_object`: whether a program has it as an object, which need not be found by
    a name."""
    if not (isinstance(candidate, type) and issubclass(candidate, Method)):
        what = f"the class {candidate.__name__}" if isinstance(candidate, type) else f"{candidate!r:.60}"
        raise UserError(
            f"{where} is {what}; it must be a class that derives from llm_fed.method.Method, or a function under "
            "@Merger(...) of llm_fed.method.merge"
        )
    # By this name a checkpoint's run and the ranks of a launch find it again.
    path = plugins.path_of(candidate)
    if not is_object and "<" in path:
        raise UserError(f"{where} is not found as {path}; define it at the top level of its module")
    if "__dataclass_params__" not in vars(candidate):  # Method's own would be inherited
        raise UserError(
            f"{where}: {candidate.__name__} is not a dataclass itself, so its settings are not read; write "
            "@dataclass(frozen=True) above it"
        )
    for name, hint in fields_of(candidate).items():
        if not takes_plain(hint):
            kind = hint.__name__ if type(hint) is type else hint  # a list[int] has the name of a list
            raise UserError(
                f"{where}: its setting {name} is of the type {kind}; settings can be "
                f"{PLAIN}, or several of these with | between"
            )
