"""Names in a configuration's `adapter.target_modules` match, or are named with the closest layers of that base."""

import json

import every_family
import peft
import pytest
import tiny
import tiny_base
import tiny_images
import torch
from torch import nn

from llm_fed.basics.errors import UserError
from llm_fed.experiment import run
from llm_fed.export import models, peft_folders, peft_settings
from llm_fed.models.lora import Lora, check_names, layout, targets
from llm_fed.settings.config import AdapterConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State


@pytest.mark.parametrize("kind", ["llama", "qwen3", "vit"])
def test_every_ending_of_a_layers_name_is_right_and_with_two_letters_swapped_wrong(kind):
    """Generated: each layer's name with all numbers of last parts; the error suggests what was meant, as dotted."""
    model = tiny.build(kind)
    for name in [name for name, _ in model.named_modules() if name.endswith("_proj")]:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            right = ".".join(parts[-count:])
            check_names(model, AdapterConfig(target_modules=("q_proj", right)))
            wrong = right.replace("proj", "porj")
            with pytest.raises(UserError) as caught:
                check_names(model, AdapterConfig(target_modules=("q_proj", wrong)))
            assert f"names {wrong!r}, but" in str(caught.value)
            assert right in str(caught.value).partition("linear layers named ")[2].split(", ")


@pytest.mark.parametrize(
    ("kind", "names", "parts"),
    [
        ("llama", ("q_proj", "vproj"), ["'vproj'", "LlamaForCausalLM", "v_proj"]),
        ("llama", ("q_proj", "vproj", "kproj"), ["'vproj' and 'kproj'", "v_proj", "k_proj"]),
        ("llama", ("q_proj", "self_attn.vproj"), ["'self_attn.vproj'", "self_attn.v_proj"]),
        ("gpt2", ("c_attn", "c_porj"), ["'c_porj'", "GPT2LMHeadModel", "c_proj"]),
        ("gpt2", ("attn.c_attn", "mlp.cproj"), ["'mlp.cproj'", "mlp.c_proj"]),
        ("vit", ("query", "q_proj"), ["'query'", "ViTForImageClassification"]),
        ("llama", ("q_proj", "proj"), ["'proj'"]),  # last parts are whole words
    ],
)
def test_the_unmatched_names_and_the_closest_layers(kind, names, parts):
    with pytest.raises(UserError) as caught:
        check_names(tiny.build(kind), AdapterConfig(target_modules=names))
    for part in parts:
        assert part in str(caught.value)
    assert f"{names[0]!r} and" not in str(caught.value)


def test_none_matches_names_the_closest_of_each():
    with pytest.raises(UserError, match="q_proj.*v_proj|v_proj.*q_proj"):
        targets(tiny.build("llama"), Lora(1, 1, 0, ("qproj", "vproj")))


def test_a_module_that_is_no_linear_layer_has_its_own_message():
    with pytest.raises(UserError, match="matches model.layers.0.self_attn, a LlamaAttention.*q_proj.*within it"):
        targets(tiny.build("llama"), Lora(1, 1, 0, ("q_proj", "self_attn")))
    with pytest.raises(UserError, match="a LlamaRMSNorm; only linear layers can be adapted$"):
        targets(tiny.build("llama"), Lora(1, 1, 0, ("q_proj", "input_layernorm")))


@pytest.mark.parametrize("chosen", [".*(q_proj|vproj)", "all-linear"])
def test_a_regular_expression_has_no_names(chosen):
    check_names(tiny.build("llama"), AdapterConfig(target_modules=chosen))


def test_an_image_model_is_checked_too(tmp_path):
    path = tiny_images.npz(tmp_path / "a.npz", train=24, test=12)
    tiny_images.save(tiny_images.vit(torch.float32), tmp_path / "vit")
    tree = tiny_images.tree(
        path, base={"name": str(tmp_path / "vit")}, method={"name": "fedit"},
        adapter={"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj", "vproj"]},
    )  # fmt: skip
    with pytest.raises(UserError, match="'vproj'"):
        run.train(from_dict(tree), tmp_path / "run")


def test_a_strangers_folder_may_name_more(tmp_path):
    base = tiny_base.around(tiny.build("llama"))
    structure = Lora(2, 4, 0.0, ("q_proj", "v_proj"))
    places = layout(base.model, structure)
    models.write(tmp_path / "a", State(places, torch.ones(places.size)), structure, base, "card")
    path = tmp_path / "a" / peft_settings.CONFIG
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"target_modules": ["q_proj", "v_proj", "query_key_value"]}))
    state, _ = peft_folders.read(tmp_path / "a", base)
    assert state.layout == places


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "llama", "falcon"])
def test_layers_whose_weights_are_only_read_have_no_adapters(family):
    """All others are called: an adapter on a layer that is not would change nothing."""
    model = every_family.noisy(family)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    called: set[str] = set()
    for name in linear:
        model.get_submodule(name).register_forward_hook(lambda *given, name=name: called.add(name))
    with torch.no_grad():
        model(input_ids=torch.tensor([[2, 3, 4]]))
    read = sorted({name.rpartition(".")[2] for name in linear - called})
    assert read == (["dt_proj"] if family in ("mamba", "falcon_mamba", "jamba") else [])
    for name in read:
        with pytest.raises(UserError, match=f"matches .*{name}, whose weights .*not be felt; leave it out, e.g. "):
            targets(model, Lora(2, 4.0, 0.0, (name,)))


def test_layers_that_peft_does_not_adapt_are_refused():
    """A kernel for GPUs reads their weights, so PEFT would not load the folder."""
    model = every_family.noisy("mamba")
    with pytest.raises(UserError, match=r"out_proj, whose weights .* adapter\.target_modules=\[in_proj,x_proj\]"):
        targets(model, Lora(2, 4.0, 0.0, ("in_proj", "out_proj")))
    with pytest.raises(ValueError, match="out_proj"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["in_proj", "out_proj"]))
