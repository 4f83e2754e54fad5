"""Chat templates of every kind, and what each is known to write of a conversation."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from odd_tokenizers import Style

from llm_fed.tasks.control import reasoning

BLOCK = "<think>\n\n</think>\n\n"  # what templates write where there is no reasoning


@dataclass(frozen=True)
class Form:
    """A chat template, and what it is known to write.

    Attributes:
        text: with {start}, {end} and {bos} for a tokenizer's control tokens.
        written: of a reply, and whether it is the last: what stands in the text.
        others: the same of a text of the user or of the system.
        end: what ends each turn; empty: nothing.
        system: whether it takes a system text.
        trims_system: whether that is treated as a text of the user.
    """

    text: str
    written: Callable[[str, bool], str]
    others: Callable[[str], str] = str
    end: str = "{end}"
    system: bool = True
    trims_system: bool = True


def _as_is(content: str, last: bool) -> str:
    return content


def _stripped(content: str, last: bool = False) -> str:
    return content.strip()


def _rest(content: str) -> str:
    """What stands behind reasoning."""
    return content[content.index("</think>") + len("</think>") :] if reasoning(content) else content


def _without_reasoning(content: str, last: bool) -> str:
    return _rest(content).lstrip("\n")


def _after_the_tag(content: str) -> str:
    """A user who spells the tag: it stays, since it is text."""
    return content.lstrip("\n")


def _with_reasoning(content: str, last: bool) -> str:
    """Qwen3 keeps it in the last turn, in a form of its own."""
    rest = _rest(content)
    rest = rest.lstrip("\n") if last or reasoning(content) else rest
    if not (last and reasoning(content)):
        return rest
    inner = content[: reasoning(content)].partition("<think>")[2].partition("</think>")[0]
    return f"<think>\n{inner.strip(chr(10))}\n</think>\n\n{rest}" if inner.strip("\n") else rest


ASKED = "{% if add_generation_prompt %}{start}assistant\n{% endif %}"
FORMS = {
    "chatml": Form("{% for m in messages %}{start}{{ m.role }}\n{{ m.content }}{end}\n{% endfor %}" + ASKED, _as_is),
    "chatml that trims": Form(
        "{% for m in messages %}{start}{{ m.role }}\n{{ m.content | trim }}{end}\n{% endfor %}" + ASKED,
        _stripped,
        _stripped,
    ),
    "with marks": Form(
        "{% for m in messages %}{start}{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{end}"
        "{% endgeneration %}{% else %}{{ m.content }}{end}{% endif %}\n{% endfor %}" + ASKED,
        _as_is,
    ),
    "with marks around the header": Form(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{start}assistant\n{{ m.content }}{end}\n"
        "{% endgeneration %}{% else %}{start}{{ m.role }}\n{{ m.content }}{end}\n{% endif %}{% endfor %}" + ASKED,
        _as_is,
    ),
    "with tools": Form(
        "{% for m in messages %}{start}{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
        "{{ c.function | tojson }}</tool_call>{% endfor %}{end}\n{% endfor %}" + ASKED,
        _as_is,
    ),
    "thinks unless told": Form(
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set c = m.content %}{%- set r = '' %}"
        "{%- if '</think>' in c %}{%- set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{%- set c = c.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '{start}assistant\n' }}"
        "{%- if loop.last %}{{- '<think>\n' + r + '\n</think>\n\n' + c.lstrip('\n') }}{%- else %}{{- c }}{%- endif %}"
        "{{- '{end}\n' }}{%- else %}{{- '{start}' + m.role + '\n' + m.content + '{end}\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '{start}assistant\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}",
        _with_reasoning,
    ),
    "always thinks": Form(
        "{% for m in messages %}{% if m.role == 'assistant' %}{start}assistant\n"
        "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{end}\n{% else %}{start}{{ m.role }}\n"
        "{{ m.content }}{end}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{start}assistant\n{{ '<think>\n' }}{% endif %}",
        _without_reasoning,
    ),
    "thought is gone": Form(
        "{% for m in messages %}{start}{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n') }}{end}\n"
        "{% endfor %}{% if add_generation_prompt %}{start}assistant\n{{ '<think>\n' }}{% endif %}",
        _without_reasoning,
        _after_the_tag,
    ),
    "mistral": Form(
        "{bos}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
        "{{ ' ' + m.content + '{end}' }}{% endif %}{% endfor %}",
        _as_is,
        system=False,
    ),
    "llama-2": Form(
        "{% for m in messages %}{% if m.role == 'user' %}{{ '{bos}[INST] ' + m.content.strip() + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' {end}' }}{% endif %}{% endfor %}",
        _stripped,
        _stripped,
        system=False,
    ),
    "gemma": Form(
        "{bos}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
        "{start}{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}{end}\n{% endfor %}"
        "{% if add_generation_prompt %}{start}model\n{% endif %}",
        _stripped,
        _stripped,
        system=False,
    ),
    "zephyr": Form(
        "{% for m in messages %}{start}{{ m.role }}>\n{{ m.content }}{end}\n{% endfor %}"
        "{% if add_generation_prompt %}{start}assistant>{% endif %}",
        _as_is,
    ),
    "vicuna": Form(
        "{bos}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}{% elif m.role == 'user' %}"
        "{{ 'USER: ' + m.content + ' ' }}{% else %}{{ 'ASSISTANT: ' + m.content + '{end}' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        _as_is,
    ),
    "phi": Form(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{end}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        _as_is,
    ),
    "starts alone": Form(
        "{% for m in messages %}{start}{{ m.role }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{start}assistant {% endif %}",
        _as_is,
        end="",
    ),
    "an end at the last": Form(
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}{end}{% else %}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}",
        _as_is,
    ),
    "no end": Form(
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}",
        _as_is,
        end="",
    ),
    "a space behind the header": Form(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{end}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        _as_is,
    ),
}  # fmt: skip
CHATML = Style("<|im_start|>", "<|im_end|>", "")


def form_for(name: str, style: Style) -> Form:
    """A form with a tokenizer's control tokens."""
    form = FORMS[name]
    text, end = form.text, form.end
    for key in ("start", "end", "bos"):
        text, end = (part.replace(f"{{{key}}}", getattr(style, key)) for part in (text, end))
    return replace(form, text=text, end=end)
