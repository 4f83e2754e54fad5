"""What is typed out of habit is answered with the one thing to type, on the command line, in YAML and from Python; and
that is a setting that there is."""

import pytest

import llm_fed as package
from llm_fed.basics.errors import UserError
from llm_fed.cli.program import app
from llm_fed.settings import configfile, habits
from llm_fed.settings.config import Config

OURS = configfile.flat(configfile.as_dict(Config()))
# A word on the command line, and what to type.
WORDS = {
    "lr=1e-3": "local.lr=1e-3",
    "local.learning_rate=1e-3": "local.lr=1e-3",
    "local.lr=0,001": "local.lr=0.001",
    "num_train_epochs=3": "local.epochs=3 local.steps=null",
    "per_device_train_batch_size=8": "local.batch_size=8",
    "lora_r=16": "adapter.rank=16",
    "adapter.r=16": "adapter.rank=16",
    "load_in_4bit=true": "base.quantization=nf4",
    "num_rounds=3": "rounds=3",
    "fraction_fit=0.5": "participation=0.5",
    "lora_target_modules=[q_proj,v_proj]": "adapter.target_modules=[q_proj,v_proj]",
    "bad_rows=skip": "task.bad_rows=skip",
}


@pytest.mark.parametrize("setting", sorted(habits._NAMES))
def test_what_is_said_is_a_setting(setting):
    key, _, value = setting.partition("=")
    assert key == "method" or key in OURS
    if value:
        configfile.keys_of([setting], "here")


def test_every_habit_has_one_answer_and_hides_no_setting():
    names = [name for names in habits._NAMES.values() for name in names.split()]
    assert len(names) == len(set(names)) and not {*names} & {key for key in OURS if "." not in key}
    assert {*habits.COMMANDS.values()} <= {
        command.name or command.callback.__name__ for command in app.registered_commands
    }
    assert not {*habits.COMMANDS} & {command.name or command.callback.__name__ for command in app.registered_commands}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_out_of_habit(word, llm_fed, tmp_path):
    (tmp_path / "c.yaml").write_text("base: {name: x}\n")
    said = llm_fed("run", tmp_path / "c.yaml", word)
    said.assert_refused(f"; type {WORDS[word]}" if WORDS[word] else word.partition("=")[0].partition(".")[0])


@pytest.mark.parametrize(
    "words, typed",
    [
        (["--rounds", "3"], "type rounds=3"),
        (["--rounds=3"], "type rounds=3"),
        (["--learning-rate", "1e-3"], "type local.lr=1e-3"),
        (["rounds", "=", "2"], "got 'rounds' after the configuration file; settings look like local.lr=1e-4"),
        (["--no-such-thing", "2"], "No such option"),
        (["nonsense", "2"], "settings look like"),
    ],
)
def test_other_forms_of_words(words, typed, llm_fed, tmp_path):
    (tmp_path / "c.yaml").write_text("base: {name: x}\n")
    said = llm_fed("run", tmp_path / "c.yaml", *words)
    assert said.code == 2 and typed in said.err


def test_in_a_file_and_from_python(tmp_path):
    (tmp_path / "c.yaml").write_text("base: {name: x}\nlocal: {learning_rate: 1e-3}\n")
    with pytest.raises(UserError, match="unknown key local.learning_rate; type local.lr=1e-3"):
        package.run(tmp_path / "c.yaml")
    with pytest.raises(UserError, match="unknown key lora"):
        package.run({"lora": {"r": 8}})
    with pytest.raises(UserError, match='llm_fed.run has no argument rounds=; .* "rounds=3"'):
        package.run({}, rounds=3)
    with pytest.raises(UserError, match='llm_fed.compare has no argument learning_rate=; .* "local.lr=0.01"'):
        package.compare({}, out=tmp_path, learning_rate=0.01)
