"""Texts in a batch are what they are alone, in families with a head."""

import warnings
from typing import Any

import every_family
import pytest
import tiny
import torch
from classifiers import tokenizer
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from llm_fed.basics.errors import UserError
from llm_fed.engine.engine import Engine
from llm_fed.kinds import sequences
from llm_fed.kinds.sentences import Sentence
from llm_fed.kinds.sequences import Sequences, check_classifier
from llm_fed.method.optimizer import Optimizer
from llm_fed.models.architectures import FELT, heads_of, usual_targets
from llm_fed.models.deberta import with_own_positions
from llm_fed.settings.config import AdapterConfig

FAMILIES = tuple(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
LABELS = ("a", "b", "c")


IN_FLOAT32 = ("gpt_neo", "mpt")  # compute attention so, whatever the dtype of the model
ROUNDING = 1e-3  # AdamW makes a step of up to its rate of a gradient as small as its rounding


def made(family: str) -> Sequences:
    """A base of the family with random weights.

    Raises:
        UserError: such a base is refused.
        Exception: transformers cannot make it so small.
    """
    config = every_family.config_of(family)
    check_classifier(config, family)
    for part in (config, config.get_text_config()):
        part.num_labels, part.pad_token_id, part.use_cache = len(LABELS), 1, False
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).eval()
        experts = any(name.endswith("experts") for name, _ in model.named_modules())  # whose products have no float64
        model = model if experts else model.double()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    with_own_positions(model)
    heads = heads_of(model, (), family)
    return Sequences(model=model, tokenizer=tokenizer(), name=family, dtype=model.dtype, head=heads[-1],
                     before_head=heads[:-1], labels=LABELS, fresh=heads)  # fmt: skip


def difference(base: Sequences) -> float:
    """The largest between two clients that train together, and each alone."""
    chosen = usual_targets(base.model)
    if chosen is None:
        raise UserError("nothing is called like the query and the value of attention")
    structure: Any = base.structure(AdapterConfig(rank=2, alpha=4, dropout=0.1, target_modules=chosen))
    jobs = []
    for client, lengths in enumerate(((3, 9, 5), (12, 2, 7))):
        draws = torch.Generator().manual_seed(client)
        texts = [
            Sentence([0, *torch.randint(4, 34, (length,), generator=draws).tolist(), 2], [], n % 3)
            for n, length in enumerate(lengths)
        ]
        if base.has_types:
            texts = [Sentence(text.input_ids, [0] * len(text.input_ids), text.label) for text in texts]
        start = base.draw(structure, torch.Generator().manual_seed(client))
        jobs.append(tiny.fit_on(f"c{client}", structure, start, [texts, texts], Optimizer(0.01), seed=client))
    together = Engine(base).execute(jobs)
    found = 0.0
    for job, fitted in zip(jobs, together, strict=True):
        (alone,) = Engine(base).execute([job])
        for one in (alone, fitted):
            if isinstance(one, Exception):
                raise one
        found = max(found, float((alone.state.row - fitted.state.row).abs().max()))
        if torch.equal(alone.state.row, job.start.row):
            raise AssertionError("nothing was trained")
    return found


def examined(family: str) -> str:
    """What became of a family: equal, refused, not made, or what differs."""
    try:
        base = made(family)
    except UserError as error:
        return f"refused: {str(error)[:150]}"
    except Exception as error:  # of any kind: sizes that do not fit
        return f"not made: {type(error).__name__} {str(error)[:100]!r}"
    try:
        found = difference(base)
    except UserError as error:
        return f"refused: {str(error)[:150]}"
    limit = ROUNDING if base.dtype == torch.float32 or family in IN_FLOAT32 else 1e-10
    return "equal" if found < limit else f"differs by {found:.1e}"


@pytest.mark.parametrize("family", ["albert", "electra", "mpnet", "deberta", "gemma2", "qwen3"])
def test_a_family_is_equal(family):
    assert examined(family) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_differs(family):
    assert not examined(family).startswith("differs")


@pytest.mark.parametrize("family", FELT)
def test_families_that_feel_padding_are_refused(family):
    assert family in FAMILIES and examined(family).startswith("refused")


@pytest.mark.parametrize("family", ["convbert", "mobilebert"])
def test_the_difference_is_found(family, monkeypatch):
    monkeypatch.setattr(sequences, "FELT", {})
    assert examined(family).startswith("differs")


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_are_refused(family):
    assert "an encoder-decoder, whose two halves read the text" in examined(family)
