"""The Makefile: what it declares has a rule, and what `make help` does not show is not meant to be given by hand."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "Makefile").read_text()


def test_what_is_declared_has_a_rule():
    declared = {name for line in re.findall(r"^\.PHONY:(.*)$", TEXT, re.MULTILINE) for name in line.split()}
    assert declared == set(re.findall(r"^([a-z]+):(?!=)", TEXT, re.MULTILINE))
