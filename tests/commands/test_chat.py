"""llm-fed chat: who answers, what is remembered, and what a line of input does."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_base
import torch
from odd_tokenizers import tokenizers
from transformers import AutoTokenizer

from llm_fed import load_client, open_run
from llm_fed.basics.errors import UserError
from llm_fed.commands import chat as chatting
from llm_fed.engine import generation
from llm_fed.engine.continuous import Sampling
from llm_fed.experiment import run as experiment
from llm_fed.export.personal import Personal, alone
from llm_fed.kinds.language import load_base
from llm_fed.settings import configfile
from llm_fed.settings.config import BaseConfig
from llm_fed.tasks.templates import template_of

CHAT = (
    "{% for message in messages %}{{ 'w9' if message.role == 'user' else 'w7' }} {{ message.content }} {% endfor %}w8"
)


def script(*lines: str):
    """Somebody who types these lines and then Ctrl-D."""
    rest: Iterator[str] = iter(lines)

    def ask(_: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    return ask


def begun(folder: Path, sampling: Sampling | None = None, system: str = "") -> chatting.Chat:
    chat = chatting.of_run(folder, "ada")
    chat.sampling, chat.system = sampling, system
    return chat


@pytest.fixture(scope="module")
def conversing(small, tmp_path_factory) -> Path:
    """A run of a base with a chat template."""
    folder = tmp_path_factory.mktemp("conversing")
    base = tiny_base.folder(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(base)
    tree = small.tree(base={"name": str(base)}, rounds=1, task={"template": "chat", "max_length": 48})
    experiment.train(configfile.from_dict(tree), folder / "run")
    return folder / "run"


def test_clients_and_the_base_answer_for_themselves(small, finished, capsys):
    chat = chatting.of_run(finished, "bob")
    chatting.talk(chat, script("w20 w21", "/client ada", "w20 w21", "/base", "w20 w21", ""), shows_help=False)
    said = capsys.readouterr()
    bare = alone(load_client(finished / "adapters/ada", str(small.base)).base)
    expected = [
        load_client(finished / "adapters" / id, str(small.base)).generate(["w20 w21"])[0] for id in ("bob", "ada")
    ]
    expected.append(bare.generate(["w20 w21"])[0])
    assert said.out.split("\n")[:3] == expected and len(set(expected)) > 1
    assert "ada's adapter on" in said.err and "each prompt is answered on its own" in said.err


def test_the_first_client_begins_and_commands_say_what_there_is(finished, capsys):
    chat = chatting.of_run(finished, None)
    capsys.readouterr()
    names = list(chat.adapters)
    chatting.talk(chat, script("/client", "/client nobody", "/sing", "/help", "/quit", "w20"), shows_help=True)
    said = capsys.readouterr()
    assert chat.client == names[0] and said.out == ""
    assert said.err.startswith(f"{names[0]}'s adapter on ") and ", ".join(names) in said.err
    assert "/client='nobody' is unknown" in said.err and "/sing is not a command." in said.err
    assert said.err.count("/reset") == 3  # at the beginning, after what is no command, and when asked for
    with pytest.raises(UserError, match="--client='nobody' is unknown"):
        chatting.of_run(finished, "nobody")


def test_a_chat_template_remembers_until_reset(conversing, monkeypatch, capsys):
    asked: list[str] = []
    original = Personal.reply

    def spy(self, prompt, **options):
        text = prompt if isinstance(prompt, str) else "|".join(message["content"] for message in prompt)
        asked.append(text)
        return original(self, prompt, **options)

    monkeypatch.setattr(Personal, "reply", spy)
    chat = chatting.of_run(conversing, "ada")
    assert chat.remembers
    chatting.talk(chat, script("w20", "w21", "/reset", "w22", "/client bob", "w23"), shows_help=False)
    first = capsys.readouterr().out.split("\n")[0]
    assert asked == ["w20", f"w20|{first}|w21", "w22", "w23"]


def test_an_answer_that_is_broken_off_is_forgotten(conversing, monkeypatch, capsys):
    def broken(self, prompt, **options):
        yield "w1 "
        raise KeyboardInterrupt

    chat = chatting.of_run(conversing, "ada")
    with monkeypatch.context() as patch:
        patch.setattr(Personal, "reply", broken)
        chatting.talk(chat, script("w20"), shows_help=False)
    assert chat.said == [] and "stopped and discarded" in capsys.readouterr().err
    chatting.talk(chat, script("w21"), shows_help=False)  # the adapters are free for the next answer
    assert [message["role"] for message in chat.said] == ["user", "assistant"]


def test_an_abandoned_answer_leaves_the_base_as_it_was(small, finished):
    model = load_client(finished / "adapters/ada", str(small.base))
    before = alone(model.base).generate(["w20 w21"])
    pieces = model.reply("w20 w21")
    next(pieces)
    pieces.close()
    assert alone(model.base).generate(["w20 w21"]) == before


def test_what_a_model_says_cannot_steer_the_terminal(finished, monkeypatch, capsys):
    monkeypatch.setattr(Personal, "reply", lambda self, prompt, **options: iter(["a\x1b[2Jb\n", "c\x07"]))
    chatting.talk(chatting.of_run(finished, None), script("w20"), shows_help=False)
    assert capsys.readouterr().out == "a\ufffd[2Jb\nc\ufffd\n\n"


TEXTS = {text: text.strip() for text in ("你好，世界! naïve", "  two  spaces\n\nand lines \n", "🙂🙃", "", "plain")} | {
    "<think>\nBy the door, so\n</think>\n\nBay 4.": "Bay 4.",
    "<think>\n\n</think>\n\n": "",
    "<thin> is a tag": "<thin> is a tag",
    "It says </s> and <think>": "It says </s> and <think>",
    "<think>without an end": "",
}


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_join_to_the_answer(text, monkeypatch):
    """With a byte-level tokenizer, in which a character may be several tokens; reasoning is not shown."""
    from llm_fed.commands.quickstart import ASSETS

    base = load_base(BaseConfig(str(ASSETS / "tiny-base"), dtype="float32"), "cpu")
    ids = base.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    monkeypatch.setattr(generation, "stream", lambda *args, **options: iter(ids))
    pieces = list(alone(base).reply("x", template="plain"))
    assert "".join(pieces) == TEXTS[text] == generation.answer_text(base, [5], ids)
    assert not any("\ufffd" in piece or not piece for piece in pieces)
    assert len(pieces) > 1 or len(TEXTS[text]) < 7


def test_an_answer_of_reasoning_alone_is_told(monkeypatch, capsys):
    """Of a prompt that opened it, too."""
    from llm_fed.commands.quickstart import ASSETS

    chat = chatting.of_base(str(ASSETS / "tiny-base"), None, "plain", "float32")
    read = chat.base.tokenizer
    monkeypatch.setattr(
        generation, "stream", lambda *args, **options: iter(read("<think> hm", add_special_tokens=False).input_ids)
    )
    chatting.talk(chat, script("w20"), shows_help=False)
    said = capsys.readouterr()
    assert said.out == "\n\n" and "The answer is empty: it ended at once, or its reasoning did not end" in said.err
    opened = [*read("Which bay?\n<think>\n", add_special_tokens=False).input_ids]
    inner = read("By the door.\n</think>\n\nBay 4.", add_special_tokens=False).input_ids
    assert generation.answer_text(chat.base, opened, inner) == "Bay 4."
    assert generation.answer_text(chat.base, opened, inner[:3]) == ""


def test_a_tag_in_a_question_or_spelled_in_an_answer_opens_no_reasoning():
    """The template says whether a prompt ends in reasoning, and a token of the tag, where there is one, begins it."""
    tokenizer, _ = tokenizers()["bytes"]
    plain, opening = (  # as bases
        SimpleNamespace(tokenizer=tokenizer, prompt=SimpleNamespace(template=template_of(text, tokenizer)))
        for text in ("{prompt}", "{prompt}\n<think>\n")
    )

    def ids(text: str, spelled: bool = False) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False, split_special_tokens=spelled).input_ids]

    asked = ids("What is <think>\n")
    assert generation.answer_text(plain, asked, ids("a tag")) == "a tag"
    assert generation.answer_text(opening, asked, ids("hm</think>4")) == "4"
    assert generation.answer_text(plain, [1], ids("<think>hm</think>4")) == "4"
    assert generation.answer_text(plain, [1], ids("<think>hm")) == ""
    spelled = [id for part in ("<", "think", ">hm") for id in ids(part)]
    assert generation.answer_text(plain, [1], spelled) == "<think>hm"


def test_half_a_character_is_told(finished, capsys):
    chat = chatting.of_run(finished, None)
    chatting.talk(chat, script("w20 \ud83d", "w20"), shows_help=False)
    said = capsys.readouterr()
    assert said.err.count("A half of a character (a lone surrogate) is read as U+FFFD.") == 1
    assert len(said.out.split()) > 1


def test_the_command(small, finished, llm_fed, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w20 w21\n/base\nw20 w21\n"))
    said = llm_fed("chat", finished, "--client", "ada", "--max-new-tokens", 1)
    adapted = load_client(finished / "adapters/ada", str(small.base))
    expected = [each.generate(["w20 w21"], max_new_tokens=1)[0] for each in (adapted, alone(adapted.base))]
    assert (said.code, said.out.rstrip("\n").split("\n")) == (0, expected)
    monkeypatch.setattr("sys.stdin", io.StringIO("w20 w21\n"))
    alike = llm_fed("chat", "--base", small.base, "--adapter", finished / "adapters/ada", "--max-new-tokens", 1)
    assert alike.out.rstrip("\n") == expected[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("w20 w21\n"))
    assert (
        llm_fed("chat", "--base", small.base, "--template", "plain", "--max-new-tokens", 1).out.rstrip() == expected[1]
    )


def test_refusals(finished, llm_fed, tmp_path):
    llm_fed("chat").assert_refused("give either a run folder or --base")
    llm_fed("chat", finished, "--base", "b").assert_refused("give either a run folder or --base")
    llm_fed("chat", finished, "--template", "chat").assert_refused("--template only works with --base")
    llm_fed("chat", "--base", "b", "--client", "ada").assert_refused("--client ada only works with a run folder")
    llm_fed("chat", tmp_path).assert_refused("is not a run folder")
    llm_fed("chat", finished, "--client", "nobody").assert_refused("--client='nobody' is unknown")
    llm_fed("chat", "--base", "./nowhere").assert_refused("'./nowhere' is not a folder")
    llm_fed("chat", "--base", "b", "--template", "sonnet").assert_refused("task.template='sonnet' is unknown")


def test_sampled_answers_and_what_is_said_of_them(conversing, capsys):
    """Of top-p near 0 only the likeliest token is left, which is the greedy answer; a high temperature draws others."""
    greedy = chatting.of_run(conversing, "ada")
    expected = "".join(greedy.reply("w20"))
    narrow = begun(conversing, sampling=Sampling(1.0, 1e-6))
    capsys.readouterr()
    chatting.talk(narrow, script("w20"), shows_help=False)
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == expected
    assert said.err.endswith("; answers are sampled (temperature 1, top-p 1e-06), and scores are of greedy ones.\n")
    chatting.talk(greedy, script("w20"), shows_help=False)
    said = capsys.readouterr().err
    assert said.startswith("ada's adapter on ") and len(said.splitlines()) == 1  # also where nobody types
    answers = {"".join(begun(conversing, sampling=Sampling(50.0)).reply("w20")) for _ in range(6)}
    assert len(answers) > 2
    seeded = [begun(conversing, sampling=Sampling(50.0, seed=3)) for _ in range(2)]
    assert len({"".join(chat.reply("w20")) for chat in seeded}) == 1


def test_a_token_is_drawn_with_its_probability():
    """Logits 0 and log 3 are 1/4 and 3/4; at temperature 1/2 they are 1/10 and 9/10, of which top-p 0.9 leaves one."""
    logits = torch.tensor([[0.0, math.log(3.0)]]).repeat(4000, 1)
    device = torch.device("cpu")
    assert Sampling(1.0, seed=0).chooser(device)(logits).float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert Sampling(0.5, seed=0).chooser(device)(logits).float().mean().item() == pytest.approx(0.9, abs=0.02)
    assert Sampling(0.5, 0.89, seed=0).chooser(device)(logits).all()


@pytest.mark.parametrize("words", ["0", "-1", "nan", "inf", "hot", "0.7,0", "0.7,1.1", "0.7,0.9,1", ""])
def test_sampling_that_is_none(llm_fed, conversing, words):
    llm_fed("chat", conversing, "--sampling", words).assert_refused("e.g. 0.")


def test_a_system_prompt(conversing, finished, monkeypatch, capsys):
    """Where the template takes none of conversations it stands before each prompt; nothing of it is saved."""
    asked: list[str] = []
    original = Personal.reply

    def spy(self, prompt, **options):
        asked.append(
            "|".join([prompt] if isinstance(prompt, str) else [f"{m['role'][0]} {m['content']}" for m in prompt])
        )
        return original(self, prompt, **options)

    monkeypatch.setattr(Personal, "reply", spy)
    before = {path: path.stat().st_mtime_ns for path in conversing.rglob("*")}
    chat = begun(conversing, system="w30")
    chatting.talk(chat, script("w20", "/system w31", "w21", "/client bob", "w22", "/system", "w23"), shows_help=False)
    assert asked == ["s w30|u w20", "s w31|u w21", "s w31|u w22", "u w23"]
    assert "begins with this system prompt." in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in conversing.rglob("*")}
    asked.clear()
    chatting.talk(begun(finished, system="w30"), script("w20", "w21"), shows_help=False)
    assert asked == ["s w30|u w20", "s w30|u w21"]
    assert "with a system prompt" in begun(finished, system="w30").greeting


def test_the_same_from_python(conversing):
    result = open_run(conversing)
    assert result.chat("ada", "w20") == result.chat("ada", "w20", temperature=1.0, top_p=1e-6)
    system = result.chat("ada", "w20", system="w30")
    said = [{"role": "system", "content": "w30"}, {"role": "user", "content": "w20"}]
    assert system == "".join(result.model("ada").reply(said))
    with pytest.raises(UserError, match="the temperature of sampling is 0"):
        result.chat("ada", "w20", temperature=0.0)
