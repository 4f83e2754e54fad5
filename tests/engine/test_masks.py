"""The one place where functions of transformers are swapped that are not public."""

import pytest
import tiny
import torch
from transformers import masking_utils

from llm_fed.engine.masks import known_masks

SWAPPED = ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa")


@pytest.mark.parametrize("padded", [False, True])
def test_logits_are_the_same_and_all_is_put_back(padded):
    """Also after an error, and with a real mask where rows are padded on the left."""
    model, ids = tiny.build("llama"), torch.arange(2, 14).view(2, 6)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    before = {name: getattr(masking_utils, name) for name in SWAPPED}
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask).logits
        with known_masks(padded):
            assert all(getattr(masking_utils, name) is not before[name] for name in SWAPPED)
            torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, plain, rtol=0, atol=1e-6)
    with pytest.raises(KeyError), known_masks():
        raise KeyError
    assert {name: getattr(masking_utils, name) for name in SWAPPED} == before
