"""Families of language models that cannot be bases are refused before their weights are read, with the reason."""

import json

import every_family
import pytest
import tiny_base
from transformers import BertConfig

from llm_fed.basics.errors import UserError
from llm_fed.commands.doctor import known_of
from llm_fed.kinds.language import load_base
from llm_fed.models import families
from llm_fed.models.families import check_family, feels_padding
from llm_fed.settings.config import BaseConfig


def relabelled(place, **changes):
    """A base whose configuration says that it is of another family; its weights are none."""
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    (place / "model.safetensors").write_bytes(b"")
    return place


@pytest.mark.parametrize(
    ("family", "reason"),
    [("doge", "mixes the tokens of all rows"), ("bert", "is_decoder is false"), ("rwkv", "keeps no cache")],
)
def test_refused_before_weights_are_read(tmp_path, family, reason):
    place = relabelled(tiny_base.folder(tmp_path / "base"), model_type=family)
    with pytest.raises(UserError, match=f"is of the family {family}, which cannot be a base: .*{reason}"):
        load_base(BaseConfig(name=str(place), dtype="float32"), "cpu")


def test_the_doctor_says_so(tmp_path):
    place = relabelled(tiny_base.folder(tmp_path / "base"), model_type="bert")
    with pytest.raises(UserError, match="its tokens see later ones"):
        known_of(str(place))
    clean = {finding["what"]: finding["found"] for finding in known_of(str(tiny_base.folder(tmp_path / "llama")))}
    assert clean["answers in batches"].startswith("prompts of any length together")


def test_an_encoder_that_is_a_decoder_can_be_a_base():
    check_family(BertConfig(is_decoder=True), "mine")
    with pytest.raises(UserError, match=r"base\.name='mine' is of the family bert"):
        check_family(BertConfig(), "mine")


def test_a_family_is_one_or_the_other_and_an_unknown_one_is_not_padded():
    refused = families._ENCODERS | set(families._REFUSED)
    assert not refused & families.PADDED
    assert refused <= set(every_family.FAMILIES)
    unknown = BertConfig()
    unknown.model_type = "of-tomorrow"
    check_family(unknown, "mine")
    assert feels_padding(unknown)
