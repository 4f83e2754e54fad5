"""Loading a base: frozen, in the dtype asked for, quantized or not; users' mistakes end as one short message."""

import json
import os

import huggingface_hub
import pytest
import tiny
import tiny_base
import torch
from safetensors.torch import load_file, save_file

from llm_fed.basics.errors import UserError
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.fit import fit
from llm_fed.engine.memory import activation_checkpointing
from llm_fed.kinds.language import load_base
from llm_fed.method.optimizer import Optimizer
from llm_fed.models import lora
from llm_fed.models.lora import Lora
from llm_fed.settings.config import BaseConfig


def load(folder, **settings):
    return load_base(BaseConfig(**{"name": str(folder), "dtype": "float32", **settings}), "cpu")


def test_bfloat16_on_a_cpu_takes_the_eager_attention(tmp_path):
    """torch's fused attention goes back slowly there (docs/decisions.md)."""
    folder = tiny_base.folder(tmp_path)
    chosen = {dtype: load(folder, dtype=dtype).model.config._attn_implementation for dtype in ("float32", "bfloat16")}
    assert chosen == {"float32": "sdpa", "bfloat16": "eager"}


@pytest.mark.parametrize(
    ("name", "dtype", "autocast"),
    [
        ("float32", torch.float32, None),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16, torch.float16),
    ],
)
def test_dtype_and_frozen(tmp_path, name, dtype, autocast):
    base = load(tiny_base.folder(tmp_path), dtype=name)
    assert (base.name, base.dtype, base.autocast) == (str(tmp_path), dtype, autocast)
    assert {parameter.dtype for parameter in base.model.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert not any(module.training for module in base.model.modules())
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    for (name, loaded), saved in zip(base.model.named_parameters(), tiny.build("llama").parameters(), strict=True):
        assert torch.equal(loaded, saved.to(dtype)), name


def input_gradient(model, inputs):
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    model(inputs_embeds=embedded, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    return embedded.grad


@pytest.mark.parametrize(("quantization", "tolerance"), [("nf4", 0.3), ("int8", 0.05)])
def test_quantized_bases_compute_about_the_same_and_carry_gradients(tmp_path, caplog, quantization, tolerance):
    """Also after a pass without gradients, when bitsandbytes would repack 4-bit weights on some CPUs."""
    tiny_base.folder(tmp_path, hidden_size=64, intermediate_size=128, initializer_range=0.05)
    plain, base = load(tmp_path), load(tmp_path, quantization=quantization)
    inputs = tiny.inputs("llama", 4)
    expected = input_gradient(plain.model, inputs)
    gradient = input_gradient(base.model, inputs)
    assert 0 < (gradient - expected).norm() < tolerance * expected.norm()
    with torch.inference_mode():
        logits, exact = base.model(**inputs).logits, plain.model(**inputs).logits
    assert 0 < (logits - exact).norm() < tolerance * exact.norm()
    assert torch.equal(input_gradient(base.model, inputs), gradient)
    assert base.model.model.layers[0].mlp.up_proj.weight.dtype in (torch.uint8, torch.int8)
    assert not caplog.records


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("enabled", [True, False])
def test_activation_checkpointing_computes_each_layer_twice(tmp_path, kind, enabled):
    """The layers run again in the backward pass, although the model is in eval mode; gradients stay the same."""
    base = load(tiny_base.folder(tmp_path, kind), activation_checkpointing=enabled)
    assert not base.model.training
    passes = []
    for name, module in base.model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_: passes.append(1))
    inputs = tiny.inputs(kind, 2)
    with activation_checkpointing(base.model):
        gradient = input_gradient(base.model, inputs)
    assert len(passes) == (4 if enabled else 2)  # two layers
    torch.testing.assert_close(gradient, input_gradient(base.model, inputs))


def test_padding_is_eos_where_there_is_no_pad_token(tmp_path):
    base = load(tiny_base.folder(tmp_path, special={"eos_token": "</s>"}))
    assert (base.tokenizer.pad_token, base.tokenizer.pad_token_id) == ("</s>", 1)


def test_neither_pad_nor_eos_token(tmp_path):
    with pytest.raises(UserError, match="neither a pad nor an EOS token"):
        load(tiny_base.folder(tmp_path, special={}))


def truncated_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def incomplete_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_shapes(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated_weights, "cannot be loaded"),
        (incomplete_weights, "no weights for 1 tensors of LlamaForCausalLM, e.g. model.layers.1.mlp.up_proj"),
        (other_shapes, "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"'), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "lama"}'), "lama"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"}'), "cannot be loaded"),
    ],
)
def test_damaged_folders(tmp_path, damage, message):
    damage(tiny_base.folder(tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "./no/such/folder"}, "'./no/such/folder' is not a folder; give one"),
        ({"name": ""}, "is not a folder; give one"),
        ({"dtype": "bfloat61"}, "base.dtype='bfloat61'.*bfloat16"),
        ({"quantization": "nf5"}, "base.quantization='nf5'.*nf4"),
        ({"device_map": "auto"}, "base.device_map=auto splits the base over GPUs, but this run is on the CPU"),
    ],
)
def test_wrong_settings(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, **settings)


def test_layers_that_accelerate_keeps_elsewhere_train_alike(tmp_path):
    """On disk here; without a GPU this is as near as a test comes to a base that is divided."""
    settings = {"name": str(tiny_base.folder(tmp_path)), "dtype": "float32"}
    elsewhere = {"model.layers.1": "disk", "model.norm": "disk"}
    here = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.layers.0", "lm_head"], "cpu")
    whole = load_base(BaseConfig(**settings), "cpu")
    divided = load_base(BaseConfig(**settings, device_map={**here, **elsewhere}), "cuda")
    assert {parameter.device.type for parameter in divided.model.parameters()} == {"cpu", "meta"}
    structure = Lora(rank=2, alpha=8, dropout=0.1, target_modules=("q_proj", "v_proj"))
    start, batches = lora.draw(whole.model, structure, torch.Generator()), [tiny.examples(0, [3, 9, 5])] * 3
    job = tiny.fit_on("c", structure, start, batches, Optimizer(0.1))
    found = [fit(AdaptedModel(base.model, structure), [job])[0][0] for base in (whole, divided)]
    # Losses are had from the inputs of the last layer where it is here, and from logits where accelerate moves it.
    assert torch.allclose(found[0].state.row, found[1].state.row, rtol=1e-4, atol=1e-6)
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-6) and len(set(found[0].losses)) == 3


def test_hub_out_of_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="'someone/some-model' is not a folder here.*connect.*Offline, give"):
        load("someone/some-model")
