"""Chat templates of strangers, rendered within limits of time and size.

A template is a program, and transformers runs it in Jinja's sandbox, which keeps it from files and from Python's own
objects, but lets it loop for ever and make gigabytes. Here all that is kept is counted: what is written, assigned, or
put into a list. What makes much of little, as a product or a width does, is refused before it is made. So no value is
large and no single step takes long, and a thread ends what takes too many steps.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import lru_cache, wraps
from types import MethodType
from typing import Any, TypeVar

from jinja2 import Environment, Template, nodes
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from llm_fed.basics.errors import UserError

Result = TypeVar("Result")

SECONDS = 5.0  # of processor time for one conversation; a usual one takes less than a thousandth of that
SIZE = 2**23  # characters and items that a template may make, beside MORE of them for each character that it is given
MORE = 200
_LONGEST = 10**6  # characters of a template
_SMALL = {
    "trim", "length", "count", "default", "d", "first", "last", "int", "lower", "upper", "selectattr", "rejectattr",
}  # fmt: skip  # filters whose result is no larger than what they are given
_PARTS = 16  # names in an expression; of a longer one every sum is counted
_BLOCKS = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
_KEEPS_NOTHING = (nodes.Const, nodes.Name, nodes.Getattr, nodes.Compare, nodes.Test, nodes.Not)
_MOST_BITS = 10**5  # of a whole number
_PAUSE = 0.1  # seconds between two looks at the clock
# What makes much of little: the product of the sizes of all that it is given is what it may make.
_GROWING = {
    "replace", "join", "center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate",
    "to_bytes", "indent", "batch", "slice", "round", "wordwrap", "tojson", "xmlattr", "generate_lorem_ipsum", "sum",
}  # fmt: skip
# In the text that is formatted: a width of six digits, and one that is given with the values.
_WIDTH = re.compile(r"[{][^}]*\d{6}|%[^a-zA-Z%]*\d{6}")
_WIDTH_GIVEN = re.compile(r"[{][^}]*[{]|%[^a-zA-Z%]*[*]")
_DIGITS = re.compile(r"\d{6}")


class _TooLarge(Exception):
    pass


class _TooLong(BaseException):  # no Exception, which a filter might catch
    pass


class _Allowance:
    """What a template may still make."""

    def __init__(self, size: int):
        self.left = size

    def check(self, size: int) -> None:
        if size > self.left:
            raise _TooLarge

    def spend(self, size: int) -> None:
        self.left -= size
        self.check(0)


_budget: ContextVar[_Allowance] = ContextVar("_budget")  # set `within_limits`


def within_limits(render: Callable[[], Result], given: int, name: str) -> Result:
    """What `render` returns, which has transformers render a chat template of that name for a conversation of so many
    characters (`given`); UserError where the template takes too long, or makes too much."""
    _install()
    token = _budget.set(_Allowance(SIZE + MORE * given))
    try:
        return _watched(render)
    except (_TooLarge, MemoryError) as error:
        raise UserError(
            f"the chat template of {name!r} makes more text than any conversation needs; choose another template"
        ) from error
    except _TooLong as error:
        raise UserError(
            f"the chat template of {name!r} does not end within {SECONDS:g} s; choose another template"
        ) from error
    finally:
        _budget.reset(token)


# Time. Only the main thread may have a timer, so another one looks at the clocks.


class _RenderingThread:
    """A thread that renders a template; its time begins when `_watch` first sees it."""

    __slots__ = ("thread", "until", "is_ended")

    def __init__(self) -> None:
        self.thread, self.until, self.is_ended = threading.get_ident(), 0.0, False

    @property
    def is_over(self) -> bool:
        if hasattr(time, "pthread_getcpuclockid"):
            now = time.clock_gettime(time.pthread_getcpuclockid(self.thread))
        else:
            now = time.monotonic()
        self.until = self.until or now + SECONDS
        return now > self.until


_lock = threading.Lock()
_renderings: set[_RenderingThread] = set()
_watcher: threading.Thread | None = None


def _watched(render: Callable[[], Result]) -> Result:
    """Within it, _TooLong is raised in this thread once its time is over."""
    global _watcher
    rendering = _RenderingThread()
    with _lock:
        _renderings.add(rendering)
        if _watcher is None or not _watcher.is_alive():  # as after a fork
            _watcher = threading.Thread(target=_watch, name="chat templates", daemon=True)
            _watcher.start()
    try:
        return render()
    finally:
        try:
            _discard(rendering)
        except _TooLong:  # between the last step of the template and here
            _discard(rendering)
        if rendering.is_ended:
            _raise_in(rendering, None)  # if it is still on its way
            raise _TooLong


def _discard(rendering: _RenderingThread) -> None:
    with _lock:
        _renderings.discard(rendering)


def _raise_in(rendering: _RenderingThread, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(rendering.thread), error and ctypes.py_object(error))


def _watch() -> None:
    global _watcher
    while True:
        time.sleep(_PAUSE)
        with _lock:
            if not _renderings:
                _watcher = None
                return
            for rendering in [each for each in _renderings if each.is_over]:
                rendering.is_ended = True
                _raise_in(rendering, _TooLong)  # again and again: a callback of Python's may swallow it


# Size


def _weight(value: Any) -> int:
    """Characters and items of a value with all that is in it, as often as it is in it; _TooLarge over the budget."""
    left = _budget.get().left
    waiting, weight = [value], 0
    while waiting:
        each = waiting.pop()
        weight += 1
        if isinstance(each, str | bytes):
            weight += len(each)
        elif isinstance(each, int):
            weight += each.bit_length() // 8
        elif isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif isinstance(each, Namespace):
            waiting.append(object.__getattribute__(each, "_Namespace__attrs"))
        if weight + len(waiting) > left:
            raise _TooLarge
    return weight


def _made(value: Any) -> Any:
    kind = type(value)
    _budget.get().spend(1 + len(value) if kind is str else 1 if kind is bool or value is None else _weight(value))
    return value


def _check_growing(name: str, values: list[Any]) -> None:
    """Refuse what would make too much of what it is given: the values with which a method or a filter of this name is
    called, where those of other kinds than here do not count."""
    budget, texts = _budget.get(), [value for value in values if isinstance(value, str)]
    if name in ("format", "format_map"):
        _check_format(texts, values)
        return
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        budget.check(len(text) + (len(text) // max(1, len(old)) + 1) * len(new))
        return
    if name == "sum" and not any(isinstance(value, list | tuple) for value in values[-1:]):
        return
    product = 1
    for value in values[1:] if name == "round" else values:
        if isinstance(value, int):
            product *= 1 + abs(value)
        elif isinstance(value, str | range):
            product *= 1 + len(value)
        elif isinstance(value, list | tuple | dict):
            product *= (1 + _weight(value)) * (len(value) if name == "sum" else 1)
        budget.check(product)


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise _TooLarge


def _check_format(texts: list[str], values: list[Any]) -> None:
    _weight(values)
    numbers = [value for value in values if isinstance(value, int)]
    wide = any(_WIDTH.search(text) for text in texts[:1])
    given = any(abs(number) >= 10**5 for number in numbers) or any(_DIGITS.search(text) for text in texts[1:])
    if wide or (given and any(_WIDTH_GIVEN.search(text) for text in texts[:1])):
        raise _TooLarge


class _Bounded(ImmutableSandboxedEnvironment):
    """An environment in which everything that is made is counted."""

    intercepted_binops = frozenset(["*", "**", "%"])

    @classmethod
    def like(cls, environment: Environment) -> Environment:
        """One with the filters, globals, extensions and settings of another."""
        own = environment.overlay(cache_size=0)
        own.__class__ = cls
        for name, value in vars(environment).items():  # what extensions put there, of which the overlay has copies
            if isinstance(value, MethodType) and isinstance(value.__self__, Extension):
                setattr(own, name, MethodType(value.__func__, own.extensions[value.__self__.identifier]))
        own.filters = {name: _counted(name, filter) for name, filter in environment.filters.items()}
        own.concat = _concatenated  # type: ignore[method-assign]
        return own

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and not isinstance(left, str):
            return left % right
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*" and not (isinstance(left, float) or isinstance(right, float)):
            _check_growing("*", [left, right])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        elif operator == "%":
            _check_growing("format", [left, *(right if isinstance(right, tuple) else [right])])
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if type(__obj) is MethodType and __obj.__self__ is __self:  # what `_Counting` has put there
            return __obj(*args)
        if type(__obj) is Macro:
            for value in (*args, *kwargs.values()):
                _made(value)
        elif (name := getattr(__obj, "__name__", "")) in _GROWING:
            _check_growing(name, [_receiver(__obj), *args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        return _made(result) if type(result) in (list, dict, tuple) else result

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        # What is not written at once, but kept until a block ends, is counted piece by piece.
        self.finalize = _made if source.find(_BLOCKS) is not None else None  # type: ignore[arg-type]
        return super()._generate(_Counting(source).visit(source).set_environment(self), *args, **kwargs)

    # What `_Counting` puts into templates

    def made(self, value: Any) -> Any:
        return _made(value)

    def repeated(self, iterable: Any, text: int) -> Iterator[Any]:
        """A loop, whose body writes so many characters of the template itself each time."""
        budget, cost = _budget.get(), 1 + text
        for item in iterable:
            budget.left -= cost
            if budget.left < 0:
                raise _TooLarge
            yield item

    def begun(self, text: int) -> None:
        """A macro, which writes so many characters of the template itself."""
        _budget.get().spend(1 + text)


def _receiver(method: Any) -> Any:
    """Whose method it is; of a text's `format`, which the sandbox replaces, the text."""
    while (inner := getattr(method, "__wrapped__", None)) is not None:
        method = inner
    return getattr(method, "__self__", None)


def _concatenated(pieces: Iterable[str]) -> str:
    kept, budget = [], _budget.get()
    left = budget.left
    for piece in pieces:
        kept.append(piece)
        left -= len(piece)
        if left < 0:
            raise _TooLarge
    budget.left = min(budget.left, left)
    return "".join(kept)


def _counted(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, of which Jinja reads what it wants to be given from its attributes."""
    if name in _SMALL:
        return filter
    grows = name in _GROWING

    @wraps(filter)
    def counted(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, list | tuple | dict):  # which may become a text
                _weight(value)
        if grows:
            _check_growing(name, [*args, *kwargs.values()])
        return _made(filter(*args, **kwargs))

    return counted


class _Counting(NodeTransformer):
    """Puts the counting into a template. A sum or `a ~ b` is at most as large as its parts, so it is only counted where
    it is kept, or has many parts."""

    def __init__(self, template: nodes.Template):
        self._many: set[int] = set()
        for statement in template.find_all(nodes.Stmt):
            for expression in statement.iter_child_nodes():
                if isinstance(expression, nodes.Expr) and sum(1 for _ in expression.find_all(nodes.Name)) > _PARTS:
                    self._many |= {id(each) for each in expression.find_all((nodes.Add, nodes.Concat))}
                    self._many.add(id(expression))

    def visit_For(self, node: nodes.For) -> nodes.Node:
        text = _text_in(node)
        self.generic_visit(node)
        node.iter = _call("repeated", node.iter, nodes.Const(text))  # type: ignore[arg-type]
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        text = _text_in(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("begun", nodes.Const(text), near=node), lineno=node.lineno))
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.node, _KEEPS_NOTHING):
            node.node = _call("made", node.node)  # type: ignore[arg-type]
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:
        self.generic_visit(node)
        node.values = [_call("made", value) for value in node.values]
        return node

    def _visit_sum(self, node: Any) -> nodes.Node:
        many = id(node) in self._many
        self.generic_visit(node)
        return _call("made", node) if many else node

    def _visit_items(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"  # the names that a loop or an assignment fills
        constant = node.find((nodes.Name, nodes.Call, nodes.Filter)) is None
        return node if stored or constant else _call("made", node)

    visit_Add = visit_Concat = _visit_sum
    visit_List = visit_Dict = visit_Tuple = _visit_items


def _text_in(node: nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _call(name: str, *values: nodes.Expr, near: nodes.Node | None = None) -> nodes.Call:
    line = (near or values[0]).lineno
    attribute = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(attribute, list(values), [], None, None, lineno=line).set_lineno(line)  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _compiled(text: str) -> Template:
    assert _theirs is not None
    if len(text) > _LONGEST:
        raise _TooLarge
    return _Bounded.like(_theirs("").environment).from_string(text)  # type: ignore[arg-type]


_theirs: Callable[[str], Template] | None = None  # how transformers compiles a template


def _install() -> None:
    """Let transformers compile templates so, but only where they are rendered `within_limits`. It has no public way to
    say this; tests/test_bounded.py says with which versions this one works."""
    global _theirs
    if _theirs is not None:
        return
    from transformers.utils import chat_template_utils  # takes a second to import

    theirs = chat_template_utils._compile_jinja_template

    def compiled(chat_template: str) -> Template:
        return theirs(chat_template) if _budget.get(None) is None else _compiled(chat_template)

    chat_template_utils._compile_jinja_template = compiled  # type: ignore[assignment]
    _theirs = theirs
