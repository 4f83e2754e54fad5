"""Image models as they are loaded and drawn, and what is exported: stock libraries load it as the card says."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_images
import torch
from tiny_images import CLASSES, LORA, MAKERS, pictures
from torch import nn
from transformers import AutoModelForImageClassification, ResNetForImageClassification, ViTForImageClassification

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.engine import Engine
from llm_fed.export import models, peft_folders
from llm_fed.export.card import model_card
from llm_fed.kinds import wording
from llm_fed.kinds.images import Images, load_images
from llm_fed.kinds.wording import Model, Wording
from llm_fed.models.cnn import CNN
from llm_fed.models.images import ARCHITECTURES, HALF, head_of
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Full
from llm_fed.settings.config import IMAGE_MODELS, AdapterConfig, BaseConfig
from llm_fed.state import State

LABELS = tuple(f"class {label}" for label in range(CLASSES))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints in float32 of a ViT and a ResNet, with what their preprocessing is."""
    made = {}
    for kind in ("vit", "resnet"):
        base = MAKERS[kind](torch.float32)
        base.mean, base.std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
        made[kind] = tiny_images.save(base, tmp_path_factory.mktemp(kind))
    return made


def load(name: str | Path, labels: tuple[str, ...] = LABELS, **settings: Any) -> Images:
    return load_images(BaseConfig(**{"name": str(name), "dtype": "float32", **settings}), labels, "cpu")


def trained(base: Images, structure: Any) -> State:
    """A state that is nowhere as it was drawn, and whose statistics moved."""
    site = tiny_images.party(base, pictures(8), structure=structure, lr=0.01)
    start = site.initial()
    start = start.like(start.row + 0.02 * torch.randn(start.row.shape, generator=generator(0)))
    return tiny_images.answer(Engine(base), site.fit(start, epochs=2))


def logits(base: Images, structure: Any, state: State) -> torch.Tensor:
    site = tiny_images.party(base, pictures(5), structure=structure)
    return tiny_images.answer(Engine(base), site.logits(state, pictures(5, 3)))


def inputs(base: Images) -> torch.Tensor:
    return base.prepare(torch.stack([picture.pixels for picture in pictures(5, 3)]))


def card(shown: Wording, base: Images) -> str:
    config = "task: {name: images, path: null}\n"
    return model_card(Model(base.name, shown, len(base.labels)), client="ada", method="fedavg", paper="-",
                      metrics={"accuracy": 50.0}, config=config)  # fmt: skip


# Loading


def test_the_settings_which_must_not_import_torch_know_the_names_of_image_models():
    assert set(IMAGE_MODELS) == set(ARCHITECTURES)


def test_the_cnn_is_built_here():
    base = load("cnn", tuple(map(str, range(10))))
    assert isinstance(base.model, CNN) and sum(p.numel() for p in base.model.parameters()) == 47_818
    assert (base.size, base.mean, base.std, base.head, base.pretrained) == (32, HALF, HALF, "head", False)
    assert base.model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("kind, head", [("vit", "classifier"), ("resnet", "classifier.1")])
def test_a_checkpoint_keeps_all_but_a_head_of_another_size(folders, kind, head):
    """With four labels the checkpoint's own head fits; with seven a new one is drawn, of the run's seed alone."""
    base = load(folders[kind])
    assert (base.size, base.mean, base.std) == (16, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert base.head == head_of(base.model) == head and base.pretrained and not base.model.training
    assert base.device.type == "cpu" and base.autocast is None and load(folders[kind], dtype="bfloat16").autocast
    own = MAKERS[kind](torch.float32).model.state_dict()
    before = torch.get_rng_state()
    other = load(folders[kind], tuple("abcdefg"))
    drawn = [other.draw(Full(), generator(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0].equal(drawn[1])
    for name in drawn[0]:
        in_head = name.startswith(head)
        assert torch.equal(drawn[0][name], drawn[2][name]) != in_head, name
        if not in_head:
            assert torch.equal(drawn[0][name], own[name]), name
    assert drawn[0][f"{head}.weight"].shape[0] == 7
    assert all(torch.equal(value, own[name]) for name, value in drawn[0].extras.items())


def test_a_cnn_is_drawn_as_torch_does():
    """Uniform within 1 / sqrt(fan in) of zero, every layer, from the seed alone, whatever the base's weights are."""
    base, other = tiny_images.cnn(torch.float32), load("cnn")
    state = base.draw(Full(), generator(3))
    assert state.equal(other.draw(Full(), generator(3))) and not state.equal(base.draw(Full(), generator(4)))
    for name, parameter in base.model.named_parameters():
        assert tuple(state[name].shape) == parameter.shape
        if name.endswith("weight"):
            bound = state[name][0].numel() ** -0.5
            assert 0.9 * bound < state[name].abs().max() <= bound, name
    assert base.layout(Full()) == state.layout


def test_a_base_that_is_built_here_is_the_same_everywhere():
    """Adapters stand around its weights, which every process draws for itself."""
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        weights.append(torch.cat([parameter.flatten() for parameter in load("cnn").model.parameters()]))
        assert torch.initial_seed() == seed
    assert torch.equal(*weights)


def test_adapters_are_drawn_as_everywhere():
    base = tiny_images.vit()
    state = base.draw(LORA, generator(0))
    assert state.layout == base.layout(LORA)
    for name in state:
        if name.endswith("lora_A"):
            assert 0.15 < state[name].abs().max() <= 24**-0.5
        if name.endswith("lora_B"):
            assert not state[name].any()
    assert not torch.equal(state["classifier.weight"], base.draw(LORA, generator(1))["classifier.weight"])
    assert logits(base, LORA, state).shape == (5, CLASSES)


def test_structures_of_a_configuration():
    adapter = AdapterConfig(rank=2, alpha=6, dropout=0.0, target_modules=("q_proj", "v_proj"))
    base = tiny_images.vit()
    assert base.structure(None) == Full() and base.structure(adapter) == LORA
    with pytest.raises(UserError, match="several experts.*set adapter.rank"):
        Full().with_experts("a", "b", gate="sum")
    with pytest.raises(UserError, match="no expert 'a'; set adapter.rank"):
        Full().only("a")


def test_the_head_is_not_adapted_twice(tmp_path):
    """all-linear means every linear layer but the head, which is trained whole."""
    base = tiny_images.vit()
    structure = replace(LORA, target_modules="all-linear")
    state = base.draw(structure, generator(0))
    assert [name for name in state if name.startswith("classifier")] == ["classifier.weight", "classifier.bias"]
    adapted = {name.rpartition(".")[0] for name in state if name.endswith("lora_A")}
    assert adapted == {name for name, module in base.model.named_modules() if isinstance(module, nn.Linear)} - {
        "classifier"
    }
    models.write(tmp_path / "ada", state, structure, base, "card")
    assert models.read(tmp_path / "ada", structure, base).equal(state)
    moved = state.like(state.row + 0.05)
    models.write(tmp_path / "bob", moved, structure, base, "card")
    stock = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), str(tmp_path / "bob")).eval()
    with torch.no_grad():
        found = stock(pixel_values=inputs(base)).logits
    torch.testing.assert_close(found, logits(base, structure, moved), rtol=0, atol=1e-10)
    with pytest.raises(UserError, match="classifier.*trained whole"):
        base.draw(replace(LORA, target_modules=("q_proj", "classifier")), generator(0))


@pytest.mark.parametrize(
    "change, part", [("remove", "no weights for .* tensors"), ("damage", "cannot be loaded as an")]
)
def test_an_incomplete_checkpoint_is_refused(folders, tmp_path, change, part):
    model = ViTForImageClassification.from_pretrained(folders["vit"])
    if change == "remove":
        state = {name: value for name, value in model.state_dict().items() if "q_proj" not in name}
        model.save_pretrained(tmp_path, state_dict=state)
    else:
        model.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match=part):
        load(tmp_path)


def test_a_model_without_a_linear_layer_has_no_head():
    with pytest.raises(UserError, match="Sequential has no linear layer"):
        head_of(nn.Sequential(nn.Conv2d(3, 3, 1)))


# Exports


def run_card(text: str, folder: Path, base: str) -> Any:
    """What the card's example in Python leaves in `model`."""
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = code.replace("path/to/this/folder", str(folder)).replace(f"path/to/{Path(base).name}", base)
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope["model"].eval()


def test_an_adapter_folder_is_stock_pefts(folders, tmp_path):
    """Loaded by PEFT as the card says, it gives the same logits, and it is read back bit by bit."""
    base = load(folders["vit"], tuple("abcdefg"))
    state, before = trained(base, LORA), torch.get_rng_state()
    assert base.wording(LORA) is wording.IMAGE_ADAPTER
    text = card(wording.IMAGE_ADAPTER, base)
    models.write(tmp_path / "ada", state, LORA, base, text)
    assert torch.equal(torch.get_rng_state(), before)
    assert "library_name: peft\npipeline_tag: image-classification\n" in text
    model = run_card(text, tmp_path / "ada", base.name)
    assert isinstance(model, peft.PeftModel)
    with torch.no_grad():
        found = model(pixel_values=inputs(base)).logits
    torch.testing.assert_close(found, logits(base, LORA, state), rtol=0, atol=1e-6)
    assert found.shape == (5, 7)
    assert models.read(tmp_path / "ada", LORA, base).equal(state)
    assert (tmp_path / "ada/README.md").read_text() == text


@pytest.mark.parametrize("kind, maker", [("vit", ViTForImageClassification), ("resnet", ResNetForImageClassification)])
def test_a_whole_checkpoint_is_transformers_own(folders, tmp_path, kind, maker):
    """Its labels, preprocessing and running statistics are there."""
    base = load(folders[kind], ("ant", "bee", "cat", "dog", "eel"))
    state = trained(base, Full())
    assert base.wording(Full()) is wording.IMAGE_MODEL
    text = card(wording.IMAGE_MODEL, base)
    models.write(tmp_path / "ada", state, Full(), base, text)
    model = run_card(text, tmp_path / "ada", base.name)
    assert isinstance(model, maker) and model.config.id2label[2] == "cat" and model.config.label2id["dog"] == 3
    with torch.no_grad():
        found = model(pixel_values=inputs(base)).logits
    torch.testing.assert_close(found, logits(base, Full(), state), rtol=0, atol=1e-6)
    assert models.read(tmp_path / "ada", Full(), base).equal(state)
    _, report = AutoModelForImageClassification.from_pretrained(tmp_path / "ada", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    again = load(tmp_path / "ada", base.labels)
    assert (again.size, again.mean, again.std) == (16, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert bool(state.extras) == (kind == "resnet")


def test_every_kind_has_a_card_that_names_the_base():
    base = tiny_images.cnn()
    base.name = "some/model"
    for shown in vars(wording).values():
        if not isinstance(shown, Wording) or shown in (wording.MERGED, wording.GGUF):  # tests/export has theirs
            continue
        text = card(shown, base)
        assert f"{shown.words} of `some/model`" in text and f"pipeline_tag: {shown.task}" in text
        assert "{" not in re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0].replace("{}", "")


def test_wrong_folders_are_refused(folders, tmp_path):
    base, other = load("cnn"), load("cnn", LABELS[:3])
    state = trained(base, Full())
    models.write(tmp_path / "ada", state, Full(), base, "card")
    with pytest.raises(UserError, match=r"does not fit the base 'cnn': head.bias is \(4,\), and should be \(3,\)"):
        models.read(tmp_path / "ada", Full(), other)
    with pytest.raises(UserError, match="model.safetensors is absent, damaged or cut short"):
        models.read(tmp_path / "bob", Full(), base)
    models.write(tmp_path / "nan", state.like(state.row * float("nan")), Full(), base, "card")
    with pytest.raises(UserError, match="NaN or infinite"):
        models.read(tmp_path / "nan", Full(), base)
    vit = load(folders["vit"])
    adapter = trained(vit, LORA)
    models.write(tmp_path / "adapter", adapter, LORA, vit, "card")
    with pytest.raises(UserError, match="rank 2 and alpha 6, .*, where adapter.rank=3"):
        models.read(tmp_path / "adapter", replace(LORA, rank=3), vit)
    found, structure = peft_folders.read(tmp_path / "adapter", vit)  # the base's own head needs no structure to be read
    assert found.equal(adapter) and isinstance(structure, Lora) and structure.whole == LORA.whole
    with pytest.raises(UserError, match="does not fit the base.*classifier"):
        models.read(tmp_path / "adapter", LORA, load(folders["vit"], LABELS[:3]))
