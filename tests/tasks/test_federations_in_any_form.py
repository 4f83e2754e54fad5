"""Known federations in random forms (`tests/support/any_form.py`): what is read is what was written, and `init`
makes a configuration of each that reads the same."""

import random
import shutil
from pathlib import Path

import any_form as federations
import every
import pytest
import yaml

from llm_fed.basics.errors import UserError
from llm_fed.commands import init
from llm_fed.settings import configfile
from llm_fed.tasks import files


@pytest.mark.parametrize("seed", range(40))
def test_what_is_read_is_what_was_written(tmp_path, seed):
    federations.attempt(random.Random(seed), tmp_path)


@pytest.mark.slow
def test_of_many_forms_none_is_misread(tmp_path):
    every.passes(range(1000), lambda n: federations.attempt(random.Random(f"many-{n}"), tmp_path / str(n)))


def drafted(folder: Path, base: Path, seed: int) -> bool:
    """Let `init` look at one form, and compare what its file reads; whether it could do without asking."""
    draw = random.Random(f"init {seed}")
    given = federations.federation(draw)
    written = federations.write(given, federations.form(draw, given), folder, draw)
    client = {"client": written.columns.client} if written.columns.client else {}
    try:
        draft = init.draft(init.UserChoices(str(written.path), str(base), columns=client), None)
    except UserError as refused:
        assert "no test example" in str(refused) or "no column names the clients" in str(refused), refused
        return False
    config = configfile.load(yaml.safe_load(draft.text))
    federations.check(written, files.load(config.task, 0))
    assert set(written.lines) <= set(draft.findings)
    return True


@pytest.fixture(scope="module")
def base(small, tmp_path_factory) -> Path:
    """One whose tokenizer has a chat template, for the conversations."""
    folder = tmp_path_factory.mktemp("chat") / "base"
    shutil.copytree(small.base, folder)
    turns = "{% for m in messages %}{{ m.role + ' ' + m.content + ' </s> ' }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(turns + "{% if add_generation_prompt %}assistant {% endif %}")
    return folder


@pytest.mark.parametrize("seed", range(8))
def test_init_takes_what_a_run_takes(tmp_path, base, seed):
    drafted(tmp_path, base, seed)
