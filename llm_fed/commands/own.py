"""The objects that a Python program gives `llm_fed.run` and `llm_fed.compare` instead of names: base, data,
methods and metric."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError
from llm_fed.settings import objects, plugins
from llm_fed.settings.config import Config
from llm_fed.settings.paths import public


@dataclass(frozen=True)
class OwnObjects:
    """What stands instead of names, and what of it only this program can look up. `given`: by key of the configuration
    and name there, the object; data are there as tasks of labelled texts, too. `rows`: by label the method of a row,
    where the file does not say it."""

    words: tuple[str, ...] = ()  # settings that come before all others
    given: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    settings: Mapping[str, Json] | None = None  # of a method that is an object itself; None: those of the configuration
    dtype: str | None = None  # of a model that is an object; None: that of the configuration
    labels: tuple[str, ...] = ()  # of the rows of a comparison that were chosen, in order
    rows: Mapping[str, OwnObjects] = field(default_factory=dict)

    @classmethod
    def of(
        cls, *, base: Any = None, data: Any = None, method: Any = None, metric: Any = None, label: str = ""
    ) -> OwnObjects:
        """The arguments of `llm_fed.run`. UserError: one of them is nothing that can stand there. `label`: of a row of
        a comparison, which names its method where nothing else does."""
        words: list[str] = []
        given: dict[tuple[str, str], Any] = {}
        settings, dtype = None, None
        if isinstance(base, str):
            words.append(f"base.name={base}")
        elif base is not None:
            name, thing, dtype = _base(base)
            given["base.name", name] = thing
        if isinstance(data, str):
            words += ["task.name=files", f"task.path={data}"]
        elif data is not None:
            from llm_fed import tasks

            given |= {("task.name", name): task for name, task in tasks.of_object(data).items()}
        if method is not None:
            name, settings = (method, None) if isinstance(method, str) else _method(method, label)
            words.append(f"method.name={name}")
            given |= {("method.name", name): method} if objects.is_object(name) else {}
        if metric is not None:
            name = metric if isinstance(metric, str) else _metric(metric)
            words.append(f"eval.metric={name}")
            given |= {("eval.metric", name): metric} if objects.is_object(name) else {}
        return cls(tuple(words), given, settings, dtype)

    @classmethod
    def of_rows(cls, methods: Mapping[str, Any] | Sequence[Any], **shared: Any) -> OwnObjects:
        """The arguments of `llm_fed.compare`; names in a sequence of methods are left to the file. UserError: one of
        them is nothing that can stand there, or two methods have one label."""
        called = [(each if isinstance(each, str) else _called(each), each) for each in methods]
        labelled = list(methods.items()) if isinstance(methods, Mapping) else called
        rows: dict[str, OwnObjects] = {}
        names = {label for label, method in labelled if label is method}  # one of them may be that of a row of the file
        for label, method in labelled:
            if label is method:
                continue
            if label in rows or label in names:
                raise UserError(f"methods= has two named {label!r}; give a dictionary {{label: method}}")
            rows[str(label)] = cls.of(method=method, label=str(label))
        own = cls.of(**shared)
        given = {**own.given, **{key: thing for row in rows.values() for key, thing in row.given.items()}}
        return replace(own, given=given, labels=tuple(str(label) for label, _ in labelled), rows=rows)

    def laid_over(self, config: Config, label: str = "") -> Config:
        """The configuration, of a row of a comparison that of its `label`, with the names of the objects. UserError: it
        names something else instead of one."""
        names = {key: name for key, name in reversed([*self.given])}  # the first of each key
        if "task.name" in names:
            task = config.task
            if task.path is not None:
                raise UserError(f"task.path={task.path!r} names files, but data= gives the data; leave one of them out")
            requested = objects.named(task.name)
            name = requested if ("task.name", requested) in self.given else names["task.name"]
            config = replace(config, task=replace(task, name=name))
        if "base.name" in names:
            base = replace(config.base, name=names["base.name"])
            if self.dtype and base.dtype == "auto":
                base = replace(base, dtype=self.dtype)  # type: ignore[arg-type]  # checked where it is used
            config = replace(config, base=base)
        if self.settings is not None:
            config = replace(config, method=dict(self.settings))
        return self.rows[label].laid_over(config) if label in self.rows else config

    @property
    def note(self) -> str:
        """What of a run only this program has, of objects that are given."""
        names = {key: f"{objects.WORD[key]}=" for key, _ in self.given}
        if self.rows and "method.name" in names:
            names["method.name"] = "methods="
        return (
            f"{' and '.join(names.values())} gave objects of this program: the run folder can be read without them, "
            "but only the same call continues it"
        )


NO_OBJECTS = OwnObjects()


def _called(thing: Any) -> str:
    """The name of a class or function, or of the class of an object."""
    return str(getattr(thing, "__name__", None) or type(thing).__name__)


def _base(base: Any) -> tuple[str, Any, str]:
    """(its name, the base as a kind takes it, its dtype)"""
    from torch import nn
    from transformers import PreTrainedModel

    from llm_fed.kinds import Kind

    if isinstance(base, list):
        base = tuple(base)
    model = base.model if isinstance(base, Kind) else base[0] if isinstance(base, tuple) and base else base
    if not isinstance(model, nn.Module) or (isinstance(base, tuple) and len(base) != 2):
        raise UserError(
            f"base= is {base!r:.60}; give (model, tokenizer), a torch.nn.Module that classifies, a Kind, or a name"
        )
    if model is base and isinstance(model, PreTrainedModel) and model.can_generate():
        raise UserError(f"base= is a {type(model).__name__} without its tokenizer; give base=(model, tokenizer)")
    called = str(model.name_or_path or "") if isinstance(model, PreTrainedModel) else ""
    name = objects.named(public(called) if called else type(model).__name__)
    floating = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), None)
    dtype = model.dtype if isinstance(model, PreTrainedModel) else floating
    return name, base, str(dtype).removeprefix("torch.")


def _method(method: Any, label: str) -> tuple[str, dict[str, Json] | None]:
    """(its name, its settings where it is an object itself)"""
    from llm_fed import methods
    from llm_fed.method import Method
    from llm_fed.method.merge import kind_of
    from llm_fed.methods import fields_of

    kind = type(method) if isinstance(method, Method) else kind_of(method)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UserError(f"method= is {method!r:.60}; give a Method, its class, a function under @Merger, or a name")
    builtin = next((name for name, its in methods.BUILTIN.items() if its is kind), None)
    name = builtin or _importable(kind) or objects.named(label or kind.__name__)
    if not isinstance(method, Method):
        return name, None
    values = {key: value for key, value in asdict(method).items() if key in fields_of(kind)}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return name, {"name": name, **plain}


def _metric(metric: Any) -> str:
    from llm_fed.scoring import own_metric

    own = getattr(metric, "name", None) or _called(metric)
    own_metric.check("metric", str(own), metric)
    return _importable(metric) or objects.named("metric" if own == "<lambda>" else str(own))


def _importable(thing: Any) -> str | None:
    """`module:Name`, where any process that starts here finds the same thing under it; None where none does."""
    from llm_fed.method.merge import kind_of

    # A function behind a decorator's object has both names of its own; of another object the class alone has them.
    if getattr(thing, "__module__", None) in ("__main__", None) or not hasattr(thing, "__qualname__"):
        return None
    try:
        found = pkgutil.resolve_name(plugins.path_of(thing))
        spec = importlib.util.find_spec(thing.__module__)
    except (ImportError, ValueError, AttributeError):
        return None
    same = found is thing or kind_of(found) is thing
    return plugins.path_of(thing) if same and spec is not None and spec.origin else None
