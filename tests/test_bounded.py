"""Templates that loop for ever or make gigabytes end in a line, within little time and memory; ordinary ones write what
they write without limits."""

from __future__ import annotations

import resource
import sys
import threading
import time

import chat_forms
import pytest
import transformers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from llm_fed.basics import bounded
from llm_fed.basics.errors import UserError
from llm_fed.tasks.chat import ChatTemplate
from llm_fed.tasks.common import Template, Turn

MESSAGES = [{"role": "user", "content": " hello there"}, {"role": "assistant", "content": "hi"}]
NESTED = "{% for a in range(100000) %}{% for b in range(100000) %}BODY{% endfor %}{% endfor %}"
GROWN = "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
MUCH = "{% set s = 'x' * 7000000 %}"

TOO_LONG = {
    "loops": NESTED.replace("BODY", ""),
    "a loop that leaves all out": "{% for a in range(100000) if [1]|sort == 2 %}{% endfor %}" * 100,
    "calls that double": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "many searches": "{% set l = range(100000)|list %}" + "{% if -1 in l %}{% endif %}" * 20000,
    "sorting": NESTED.replace("BODY", "{% set x = range(100000)|sort %}"),
    "marked": "{% generation %}" + NESTED.replace("BODY", "{% if 1 == 2 %}{% endif %}") + "{% endgeneration %}",
}
TOO_LARGE = {
    "text": NESTED.replace("BODY", "x" * 100),
    "text of a macro": "{% macro f() %}" + NESTED.replace("BODY", "x" * 100) + "{% endmacro %}{{ f() }}",
    "a product": "{{ 'x' * 10000000000 }}",
    "a product of lists": "{{ [0] * 10000000000 }}",
    "a product of products": "{{ 'x' * (10 ** 10) }}",
    "a power": "{{ 10 ** 10000000 }}",
    "squares": GROWN.replace("'xx'", "12345").replace("STEP", "ns.x * ns.x"),
    "a width": "{{ 'x'|center(10000000000) }}",
    "a width of a method": "{{ 'x'.ljust(10000000000) }}",
    "a width in a format": "{{ '%10000000000d' % 1 }}",
    "a width in braces": "{{ '{:10000000000}'.format(1) }}",
    "a width that is given": "{{ '{:{}}'.format(1, 10000000000) }}",
    "a width that is given as text": "{{ '{:{}}'.format(1, '10000000000') }}",
    "a width with a star": "{{ '%*d' % (10000000000, 1) }}",
    "a width of a filter": "{{ '%10000000000d'|format(1) }}",
    "sums that double": GROWN.replace("STEP", "ns.x + ns.x"),
    "texts that double": GROWN.replace("STEP", "ns.x ~ ns.x"),
    "blocks that double": GROWN.replace("{% set ns.x = STEP %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
                                        "{% set ns.x = y %}"),
    "arguments that double": "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('x') }}",
    "replacements": "{% set a = 'x' * 1000000 %}{{ a|replace('x', a) }}",
    "replacements by a method": "{% set a = 'x' * 1000000 %}{{ a.replace('', a) }}",
    "joined": "{% set a = 'x' * 1000000 %}{{ range(100000)|join(a) }}",
    "indented": "{{ ('x\n' * 100000)|indent(1000000) }}",
    "indented JSON": "{{ [[[1]]]|tojson(indent=10000000000) }}",
    "batches": "{{ [1]|batch(10000000000, 'x')|list }}",
    "lists that are added": "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(1000000) }}",
    "dummy text": "{{ lipsum(n=1000000000) }}",
    "many sums": MUCH + "{{ " + " ~ ".join(["s"] * 3000) + " }}",
    "many outputs": MUCH + "{{ s }}" * 3000,
    "many outputs in a block": MUCH + "{% filter upper %}" + "{{ s }}" * 3000 + "{% endfilter %}",
    "many names": MUCH + "".join(f"{{% set a{n} = s|upper %}}" for n in range(1000)),
    "many parts": MUCH + "".join(f"{{% set a{n} = s[1:] %}}" for n in range(1000)),
    "a long template": "x" * 2_000_000,
}  # fmt: skip
EITHER = {  # each step takes longer than the one before
    "lists that double": GROWN.replace("STEP", "[ns.x, ns.x]"),
    "pairs that double": GROWN.replace("STEP", "(ns.x, ns.x)").replace("{{ ns.x }}", "{{ {}[ns.x] }}"),
    "mappings that double": GROWN.replace("STEP", "{'a': ns.x, 'b': ns.x}").replace("ns.x }}", "ns.x|tojson }}"),
    "namespaces that double": GROWN.replace("'xx'", "namespace(a=1)").replace("STEP", "namespace(a=ns.x, b=ns.x)"),
    "lists of texts of lists": "{{ 'abc'" + "|list|string" * 100 + " }}",
}


def rendered(text: str, limited: bool = True) -> str:
    marked = "{% generation %}" in text

    def render() -> str:
        return render_jinja_template(
            [MESSAGES], chat_template=text, return_assistant_tokens_mask=marked, eos_token="</s>"
        )[0][0]

    return bounded.within_limits(render, 20, "chat") if limited else render()


@pytest.fixture(autouse=True)
def little_time(monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    monkeypatch.setattr(bounded, "_PAUSE", 0.02)
    # Where a limit ends a callback of the collector, Python calls this, and the next limit would end pytest's own.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)


@pytest.fixture(autouse=True, scope="module")
def little_memory():
    """A template that makes gigabytes after all fails here, and not the machine."""
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("what", [*TOO_LONG, *TOO_LARGE, *EITHER])
def test_a_template_that_does_not_end_well_ends_in_a_line(what, monkeypatch):
    text = (TOO_LONG | TOO_LARGE | EITHER)[what]
    with monkeypatch.context() as patch:
        patch.setattr(bounded, "SECONDS", 0.05)
        with pytest.raises(UserError, match="the chat template of 'chat' .*(does not end|more text)"):  # whichever
            rendered(text)
    assert rendered("{{ messages[0].content }}") == " hello there"  # nothing is left of it


@pytest.mark.parametrize("name", chat_forms.FORMS)
def test_ordinary_templates_write_what_they_write(name):
    text = chat_forms.form_for(name, chat_forms.CHATML).text
    assert rendered(text) == rendered(text, limited=False)


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}"
        "{{ loop.length }}{% else %}-{% endfor %}",
        "{% for m in messages[1:] %}{{ m['role'] ~ ': ' ~ m.content|trim + eos_token }}\n{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n * 2 ** 3 % 5 }}",
        "{% macro say(m, end='.') %}{{ m.content }}{{ end }}{% endmacro %}"
        "{{ say(messages[0]) }}{{ say(messages[1], '') }}",
        "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}{{ [1, 2]|tojson }}{{ none }}{{ nothing }}",
        "{{ '%s and %d' % ('x', 3) }}{{ '{} {:>3}'.format('y', 1234567) }}"
        "{{ 1234567890|round(2) }}{{ 'a,b'.split(',') }}",
        "{% set x %}in {{ messages|length }}{% endset %}{{ x|upper|replace('IN', 'out') }}{{ '-' * 10 }}",
        "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}("
        "{{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
        "{{ dict(a=messages|selectattr('role', 'equalto', 'user')|list|length) }}{{ strftime_now('%Y')|length }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{{ loop.previtem.role }}{% break %}{% endfor %}",
        "{% with a = 1, b = [2] %}{{ a }}{{ b }}{% endwith %}"
        "{% call(x) (messages|list|length)|default %}{% endcall %}",
    ],
)  # fmt: skip
def test_what_a_template_may_say_means_the_same(text):
    try:
        expected = rendered(text, limited=False)
    except Exception as error:
        with pytest.raises(type(error)):
            rendered(text)
        return
    assert rendered(text) == expected


class _Switch(Extension):
    """As transformers before 5.24 tracks `generation` marks: a method of the environment, the state of an extension."""

    def __init__(self, environment):
        super().__init__(environment)
        self.state = "off"
        environment.extend(switch_on=self.switch_on)

    def switch_on(self):
        self.state = "on"


def test_what_an_extension_added_reaches_the_extension_that_renders():
    """Jinja's overlay copies the extensions, and leaves the environment the methods of the old ones."""
    own = bounded._Bounded.like(ImmutableSandboxedEnvironment(extensions=[_Switch]))
    own.switch_on()
    assert own.extensions[_Switch.identifier].state == "on"


def test_long_conversations_are_no_large_templates(monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 30.0)
    messages = [{"role": role, "content": "word " * 2000} for role in ("user", "assistant")] * 200
    text = "{% for m in messages %}{% set c = m.content|trim|replace('a', 'bb') %}{{ m.role + c }}{% endfor %}"
    given = sum(len(message["content"]) for message in messages)

    def render() -> str:
        return render_jinja_template([messages], chat_template=text)[0][0]

    assert bounded.within_limits(render, given, "chat") == render()


def test_two_threads_have_a_limit_each():
    """Also where none of them is the main one."""
    said = []

    def run() -> None:
        with pytest.raises(UserError, match="does not end"):
            rendered(TOO_LONG["loops"])
        said.append(rendered("{{ messages|length }}"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["2", "2"]


@pytest.mark.parametrize(
    "text", [TOO_LONG["loops"], TOO_LARGE["a product"], "{{ 1 / 0 }}", "{{ " + "(" * 5000, "{{ f() }}"]
)
def test_a_conversation_in_such_a_template_is_refused_in_a_line(text, small):
    from transformers import AutoTokenizer

    template = ChatTemplate(Template("chat", text, "26 Jul 2024"), AutoTokenizer.from_pretrained(small.base))
    with pytest.raises(UserError, match="^the chat template of ") as refused:
        template.prompt([Turn("user", "hi")])
    assert "\n" not in str(refused.value)


def test_a_limit_that_something_swallows_comes_again():
    """A callback of Python's, as of a weak reference, drops what is raised in it."""
    swallowed, until = 0, time.monotonic() + 120  # the limit is of the thread's own time

    def spin() -> None:  # Python 3.13 leaves a loop's jump out of a `try` around it
        while time.monotonic() < until:
            pass

    def render() -> None:
        nonlocal swallowed
        while swallowed < 2 and time.monotonic() < until:
            try:
                spin()
            except bounded._TooLong:
                swallowed += 1
        raise bounded._TooLong

    with pytest.raises(UserError, match="does not end"):
        bounded.within_limits(render, 20, "chat")
    assert swallowed == 2
    time.sleep(0.1)  # nothing follows


def test_transformers_compiles_templates_where_the_limits_are_put():
    """Its function is private. These versions have it; with another one look whether `_install` still reaches it."""
    from transformers.utils import chat_template_utils

    rendered("{{ messages[0].content }}")
    assert chat_template_utils._compile_jinja_template.__module__ == bounded.__name__
    assert (5, 21) <= tuple(map(int, transformers.__version__.split(".")[:2])) < (6, 0)
