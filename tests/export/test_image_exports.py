"""Image models that a run hands out, one or several that answer together, loaded back outside of it."""

import dataclasses
import re
from typing import Any

import pytest
import tiny_images
import torch
from safetensors.torch import load_file, save_file
from tiny_images import CLASSES, answer, party, pictures
from tiny_rounds import base_of, sites
from torch import Tensor

from llm_fed import load_image_model, methods
from llm_fed.basics.errors import UserError
from llm_fed.engine.engine import Engine
from llm_fed.export import models
from llm_fed.export.card import model_card
from llm_fed.kinds.images import Images
from llm_fed.method import Method
from llm_fed.methods.fedem import FedEM
from llm_fed.methods.fedit import FedIT
from llm_fed.methods.fedmoe import FedMoE
from llm_fed.models.structure import Full, Structure
from llm_fed.state import State

# What is handed out

FORMS: dict[str, tuple[Method, str, str]] = {  # method, base, own architecture of the client
    "a gate over unlike models": (FedMoE(), "cnn", "resnet-9"),
    "a gate of another shape": (FedMoE(gate_width=5, gate_norm=False), "cnn", ""),
    "features added evenly": (FedMoE(gate="even"), "cnn", ""),
    "mixed probabilities": (FedEM(num_models=2), "resnet-9", ""),
    "one model": (FedIT(), "resnet-9", ""),
    "one model that is not the base": (methods.build({"name": "local"}), "cnn", "resnet-9"),
}


def images() -> Tensor:
    return torch.stack([picture.pixels for picture in pictures(5, 8)])


def handed_out(base: Images, structure: Structure, state: State, folder: Any) -> str:
    """The card of the exported model."""
    text = model_card(
        models.described(structure, base, CLASSES, None), client="ada", method="m", paper="P", metrics={},
        config="task: {name: images, path: null}",
    )  # fmt: skip
    models.write(folder, state, structure, base, text)
    return text


@pytest.mark.parametrize("form", FORMS)
def test_what_is_exported_answers_as_the_run_did(tmp_path, form):
    """Loaded as the card says, for images of other sizes, and grey ones, too; the global generator is left alone."""
    method, name, own = FORMS[form]
    base = base_of(name, torch.float32)
    (client,) = sites(base, method, (own,), {"ada": pictures(6)}).values()
    engine = Engine(base)
    draws = torch.Generator().manual_seed(5)
    state = client.initial()
    state = state.like(state.row + 0.02 * torch.randn(state.layout.size, generator=draws))
    state.extras.update({key: value + 0.1 for key, value in state.extras.items()})
    if "weights" in state.layout.names:
        state = state.updated(State.of({"weights": torch.tensor([0.2, 0.8])}))
    text, before = handed_out(base, client.structure, state, tmp_path / "ada"), torch.get_rng_state()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(tmp_path / "ada")), scope)
    assert torch.equal(torch.get_rng_state(), before)
    model = scope["model"]
    expected = answer(engine, client.logits(state, pictures(5, 8)))
    with torch.no_grad():
        torch.testing.assert_close(model(images()), expected, rtol=0, atol=1e-6)
        assert model(images()[:2, :1, :20, :24]).shape == (2, CLASSES)
        torch.testing.assert_close(model.double()(images()), expected.double(), rtol=0, atol=1e-5)
    assert model.labels == base.labels and not model.training
    assert set(load_file(tmp_path / "ada/model.safetensors")) == set(model.module.state_dict())
    assert models.read(tmp_path / "ada", client.structure, base).equal(state)
    assert "base_model" not in text.split("---")[1]  # built here: no model on the Hub
    shown = " and ".join(f"`{part}`" for part in dict.fromkeys(part or name for _, part in client.structure.parts))
    assert f" of {shown}, trained by llm_fed" in text


def test_a_checkpoint_beside_a_model_of_ones_own(tmp_path):
    """Its configuration stands in the folder, and no path."""
    made = tiny_images.resnet(torch.float32)
    base = dataclasses.replace(made, name="/somewhere/here")
    structure = Full((("", "resnet-9"),)).beside("own", "small", "first")
    assert isinstance(structure, Full)
    state = party(base, pictures(4, size=16), structure=structure).initial()
    text = handed_out(base, structure, state, tmp_path / "ada")
    assert "somewhere" not in text + (tmp_path / "ada/config.json").read_text()
    model = load_image_model(tmp_path / "ada")
    site = party(base, (), structure=structure)
    expected = answer(Engine(base), site.logits(state, pictures(5, 8)))
    with torch.no_grad():
        torch.testing.assert_close(model(images()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("change", "said"), [
    (lambda tensor: tensor.int(), "torch.int32"),
    (lambda tensor: torch.full_like(tensor, float("nan")), "NaN or infinite"),
    (lambda tensor: tensor[1:].clone(), "should be"),
    (None, "is absent"),
])  # fmt: skip
@pytest.mark.parametrize("which", ["weight", "running_var"])
def test_weights_and_statistics_of_strangers(tmp_path, which, change, said):
    """Written by another program; running statistics decide as much as weights do."""
    base = base_of("resnet-9", torch.float32)
    handed_out(base, Full(), base.draw(Full(), torch.Generator()), tmp_path / "ada")
    path = tmp_path / "ada/model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(which))
    tensors = {**tensors, name: change(tensors[name])} if change else {n: t for n, t in tensors.items() if n != name}
    save_file(tensors, path)
    with pytest.raises(UserError, match=said):
        load_image_model(tmp_path / "ada")


def test_a_checkpoint_alone_and_no_model_at_all(tmp_path):
    tiny_images.save(tiny_images.resnet(torch.float32), tmp_path / "resnet")
    model = load_image_model(tmp_path / "resnet")
    assert model(images()).shape == (5, CLASSES) and len(model.labels) == CLASSES
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="config.json is absent or damaged"):
        load_image_model(tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text("{}")
    (tmp_path / "empty/preprocessor_config.json").write_text("{}")
    with pytest.raises(UserError, match="is damaged: KeyError..id2label"):
        load_image_model(tmp_path / "empty")
    base = base_of("cnn", torch.float32)
    handed_out(base, Full(), base.draw(Full(), torch.Generator()), tmp_path / "cnn")
    (tmp_path / "cnn/model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="absent, damaged or cut short"):
        load_image_model(tmp_path / "cnn")
    settings = tmp_path / "cnn/config.json"
    settings.write_text(settings.read_text().replace('"cnn"', '"cmn"'))
    with pytest.raises(UserError, match="closest is 'cnn'"):
        load_image_model(tmp_path / "cnn")
