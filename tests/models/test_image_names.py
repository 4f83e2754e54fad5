"""Names of image models are known to the settings, which must not import torch, and to the models that they name."""

from llm_fed.models.images import ARCHITECTURES
from llm_fed.settings.config import IMAGE_MODELS


def test_they_are_the_same():
    assert set(IMAGE_MODELS) == set(ARCHITECTURES)
