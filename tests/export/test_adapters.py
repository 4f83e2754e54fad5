"""PEFT folders: stock PEFT loads what is written here and the reverse; bad folders end as one clear message."""

import copy
import errno
import json
import math
import warnings

import peft
import pytest
import tiny
import tiny_base
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from llm_fed.basics import files
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdapterBank
from llm_fed.export import models, peft_folders, peft_settings
from llm_fed.models.lora import Lora, layout
from llm_fed.state import State

REGEX = {
    "llama": r".*layers\.1\..*(q_proj|up_proj)",
    "qwen3": r"model\.layers\.\d+\.self_attn\.o_proj",
    "gpt2": r".*\.1\.attn\.c_attn",
}


def make(kind="llama", targets=None, alpha=5.0, seed=1, **changes):
    """A base, a structure and an adapter whose B is not zero."""
    base = tiny_base.around(tiny.build(kind, **changes))
    structure = Lora(3, alpha, 0.1, targets or tiny.TARGETS[kind])
    places = layout(base.model, structure)
    return (base, structure, State(places, 0.2 * torch.randn(places.size, generator=generator(seed, "adapter"))))


def bank_logits(base, structure, state, kind="llama"):
    inputs = tiny.inputs(kind, 2)
    bank = AdapterBank(base.model, structure, 1)
    bank.load(0, state)
    with torch.no_grad(), bank.attached(torch.tensor([0, 0])):
        return base.model(**inputs).logits


def stock_folder(folder, base, **settings):
    """An adapter that stock PEFT made, with random B, saved by stock PEFT; and its model."""
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings}
    wrapped = peft.get_peft_model(copy.deepcopy(base.model), peft.LoraConfig(**settings))
    draws = generator(2, "stock")
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=draws)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("by", ["names", "regex", "all-linear"])
def test_stock_peft_loads_what_is_written(tmp_path, kind, by):
    targets = {"names": None, "regex": REGEX[kind], "all-linear": "all-linear"}[by]
    base, structure, state = make(kind, targets)
    folder = tmp_path / "runs" / "adapter"
    models.write(folder, state, structure, base, "a card")
    assert (folder / "README.md").read_text() == "a card"
    assert {path.name for path in folder.parent.iterdir()} == {"adapter"}
    config = json.loads((folder / "adapter_config.json").read_text())
    written = {name: config[name] for name in ("base_model_name_or_path", "task_type", "r", "lora_alpha")}
    assert written == {"base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 5}
    assert (config["lora_dropout"], config["inference_mode"]) == (0.1, True)
    assert config["fan_in_fan_out"] is (kind == "gpt2")
    assert config["target_modules"] == (targets or sorted(tiny.TARGETS[kind]))
    with warnings.catch_warnings():  # PEFT warns of missing keys
        warnings.simplefilter("error", UserWarning)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), folder)
    expected = peft.get_peft_model_state_dict(loaded)
    assert expected.keys() == load_file(folder / "adapter_model.safetensors").keys()
    with torch.no_grad():
        logits = loaded(**tiny.inputs(kind, 2)).logits
        assert (logits - base.model(**tiny.inputs(kind, 2)).logits).abs().max() > 1e-2
    torch.testing.assert_close(bank_logits(base, structure, state, kind), logits, rtol=0, atol=1e-5)
    again, found = peft_folders.read(folder, base, structure)
    assert again.equal(state)
    assert (found.rank, found.alpha, found.dropout) == (3, 5.0, 0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(tmp_path, dtype):
    """A file keeps the state's dtype; what is read is at least float32."""
    base, structure, state = make()
    state = State(state.layout, state.row.to(dtype))
    models.write(tmp_path / "a", state, structure, base, "")
    assert load_file(tmp_path / "a" / peft_folders.WEIGHTS).popitem()[1].dtype == dtype
    row = peft_folders.read(tmp_path / "a", base)[0].row
    assert row.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(row, state.row.to(row.dtype))


SAVED: dict[str, dict[str, object]] = {
    "plain": {}, "rslora": {"use_rslora": True}, "regex": {"target_modules": r".*\.0\..*down_proj"},
    "all-linear": {"target_modules": "all-linear"}, "dora": {"use_dora": True},
    "gaussian": {"init_lora_weights": "gaussian", "lora_dropout": 0.3}, "layer": {"layers_to_transform": [1]},
    "layer-pattern": {"layers_to_transform": 0, "layers_pattern": "layers"}, "exclude": {"exclude_modules": ["v_proj"]},
    "exclude-regex": {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*"},
    "uniform-patterns": {"rank_pattern": {"q_proj": 2, "v_proj": 2}, "alpha_pattern": {".*_proj": 7}},
    "head": {"target_modules": ["q_proj", "lm_head"]},
}  # fmt: skip


@pytest.mark.parametrize("settings", SAVED.values(), ids=SAVED)
def test_what_stock_peft_saved_is_read(tmp_path, settings):
    base, _, _ = make()
    if settings.get("layers_to_transform") == 0 and Version(peft.__version__) < Version("0.21"):
        pytest.skip("PEFT before 0.21 refuses a pattern of layers together with layer 0")
    wrapped = stock_folder(tmp_path, base, **settings)
    state, structure = peft_folders.read(tmp_path, base)
    alpha = 7 if "alpha_pattern" in settings else 5
    assert structure.alpha == (alpha * math.sqrt(3) if "use_rslora" in settings else alpha)
    with torch.no_grad():
        expected = wrapped.eval()(**tiny.inputs("llama", 2)).logits
    torch.testing.assert_close(bank_logits(base, structure, state), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ],
)
def test_features_that_are_not_plain_lora_are_named(tmp_path, settings, feature):
    base, _, _ = make()
    stock_folder(tmp_path, base, **settings)
    with pytest.raises(UserError, match=f"{feature}.*not supported"):
        peft_folders.read(tmp_path, base)


def edited(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_another_base_by_name_warns_and_by_shape_is_refused(tmp_path):
    base, structure, state = make()
    models.write(tmp_path / "a", state, structure, base, "")
    base.name = "other"
    with pytest.warns(peft_folders.AdapterWarning, match="made for 'tiny', the base here is 'other'"):
        assert peft_folders.read(tmp_path / "a", base)[0].equal(state)
    wider = tiny_base.around(tiny.build("llama", hidden_size=32), "wider")
    with pytest.raises(UserError, match=r"lora_A.weight is \(3, 24\) in the file and \(3, 32\) in the base; it was"):
        peft_folders.read(tmp_path / "a", wider)
    deeper = tiny_base.around(tiny.build("llama", num_hidden_layers=3), "deeper")
    with pytest.raises(UserError, match=r"layers.2.*absent in the file"):
        peft_folders.read(tmp_path / "a", deeper)
    gpt2 = tiny_base.around(tiny.build("gpt2"), "gpt2")
    with pytest.raises(UserError, match="matches no layer of GPT2LMHeadModel.*made for 'tiny'"):
        peft_folders.read(tmp_path / "a", gpt2)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Lora(4, 20 / 3, 0.1, ("q_proj",)), "has rank 3 and alpha 5, .*, where adapter.rank=4"),
        (Lora(3, 6, 0.1, ("q_proj", "v_proj", "down_proj")), "alpha 5, .*where.*adapter.alpha=6"),
        (Lora(3, 5, 0.1, ("q_proj", "v_proj")), "down_proj.*absent in the base"),
        (Lora(3, 5, 0.1, ("q_proj", "v_proj", "down_proj", "k_proj")), "k_proj.*absent in the file"),
    ],
)
def test_another_structure_than_expected_is_refused(tmp_path, expected, message):
    base, structure, state = make()
    models.write(tmp_path / "a", state, structure, base, "")
    with pytest.raises(UserError, match=message):
        peft_folders.read(tmp_path / "a", base, expected)


def rewrite(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def pickled(folder):
    torch.save(load_file(folder / peft_folders.WEIGHTS), folder / "adapter_model.bin")
    (folder / peft_folders.WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / peft_settings.CONFIG).unlink(), "is not an adapter folder"),
        (lambda folder: (folder / peft_folders.WEIGHTS).unlink(), "only safetensors is read"),
        (pickled, "only safetensors is read"),
        (lambda folder: rewrite(folder, peft_folders.WEIGHTS, lambda data: data[:-7]), "damaged or cut short"),
        (lambda folder: rewrite(folder, peft_folders.WEIGHTS, lambda data: data[:5]), "damaged or cut short"),
        (lambda folder: rewrite(folder, peft_folders.WEIGHTS, lambda data: b"\xff" * 99), "damaged or cut short"),
        (lambda folder: rewrite(folder, peft_settings.CONFIG, lambda data: data[:-7]), "json is absent or damaged"),
        (lambda folder: rewrite(folder, peft_settings.CONFIG, lambda data: b"[1]"), "it is not a JSON object"),
        (lambda folder: edited(folder, r="three"), "not the configuration of a LoRA"),
        (lambda folder: edited(folder, r=0), "not the configuration of a LoRA.*r=0: .*equal to 1$"),
        (lambda folder: edited(folder, target_modules=[]), r"target_modules is \(\); it must be at least one module"),
        (lambda folder: edited(folder, peft_type="IA3"), "type IA3; only LORA"),
    ],
)
def test_damaged_folders(tmp_path, damage, message):
    base, structure, state = make()
    models.write(tmp_path / "a", state, structure, base, "")
    damage(tmp_path / "a")
    with pytest.raises(UserError, match=message) as caught:
        peft_folders.read(tmp_path / "a", base)
    assert str(tmp_path / "a") in str(caught.value)
    with pytest.raises(UserError, match="is not an adapter folder"):
        peft_folders.read(tmp_path / "nowhere", base)


def test_a_failed_write_leaves_the_old_adapter_and_nothing_else(tmp_path, monkeypatch):
    base, structure, state = make()
    models.write(tmp_path / "a", state, structure, base, "old")
    write_file = files.write_file

    def full_disk(path, data, **how):
        if path.name == peft_folders.WEIGHTS:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(path, data, **how)

    monkeypatch.setattr(files, "write_file", full_disk)
    for name in ("a", "b"):
        with pytest.raises(RunError, match=f"cannot write an adapter to .*{name}: No space left on device"):
            models.write(tmp_path / name, state * 2, structure, base, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "README.md").read_text() == "old"
    assert peft_folders.read(tmp_path / "a", base)[0].equal(state)
    monkeypatch.undo()
    models.write(tmp_path / "a", state * 2, structure, base, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "README.md").read_text() == "new"
    assert peft_folders.read(tmp_path / "a", base)[0].equal(state * 2)


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    base, structure, state = make()
    (tmp_path / "thesis.tex").write_text("years of work")
    for folder in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(UserError, match="is not replaced"):
            models.write(folder, state, structure, base, "")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def bare(folder, *keys):
    """The settings as another program might write them: these keys alone."""
    path = folder / peft_settings.CONFIG
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key in keys}))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_settings_that_are_left_out_have_pefts_defaults(tmp_path, kind):
    """The modules too: q_proj and v_proj of a LLaMA, c_attn of a GPT-2."""
    base = tiny_base.around(tiny.build(kind))
    usual = ["q_proj", "v_proj"] if kind == "llama" else ["c_attn"]
    wrapped = stock_folder(tmp_path, base, r=8, lora_alpha=8, target_modules=usual)
    bare(tmp_path, "peft_type")
    state, structure = peft_folders.read(tmp_path, base)
    assert (structure.rank, structure.alpha, structure.dropout) == (8, 8, 0.0)
    with torch.no_grad():
        expected = wrapped.eval()(**tiny.inputs(kind, 2)).logits
    torch.testing.assert_close(bank_logits(base, structure, state, kind), expected, rtol=0, atol=1e-5)


def test_modules_of_an_architecture_that_peft_does_not_know_must_be_named(tmp_path):
    base, structure, state = make()
    models.write(tmp_path / "a", state, structure, base, "")
    bare(tmp_path / "a", "peft_type", "r", "lora_alpha")
    base.model.config.model_type = "unheard-of"
    with pytest.raises(UserError, match="names no target_modules, and PEFT has none for unheard-of; add the names"):
        peft_folders.read(tmp_path / "a", base)


@pytest.mark.parametrize("written_by", ["99.1.0", peft.__version__, None])
def test_a_setting_of_another_version_of_peft_is_named_with_it(tmp_path, written_by):
    base, structure, state = make()
    models.write(tmp_path / "a", state, structure, base, "")
    edited(tmp_path / "a", gain=[1], peft_version=written_by)
    named = r"install the one that wrote it \(99\.1\.0\), or" if written_by == "99.1.0" else "the one that wrote it, or"
    with pytest.raises(UserError, match=rf"has gain=\[1\], which the installed version of PEFT .*{named}"):
        peft_folders.read(tmp_path / "a", base)
    off = {"use_rslora": None, "use_dora": None, "megatron_core": "a", "qalora_group_size": 8, "gain": []}
    edited(tmp_path / "a", merge_weights=True, runtime_config={"a": 1}, **off)
    assert peft_folders.read(tmp_path / "a", base)[0].equal(state)


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_of_the_head_beside_an_adapter_of_it_must_be_the_bases(tmp_path, tied):
    """Also where it was rounded; a head that was trained or resized is another model's."""
    base = tiny_base.around(tiny.build("llama", tie_word_embeddings=tied))
    stock_folder(tmp_path, base, target_modules=["lm_head"])
    path, name = tmp_path / peft_folders.WEIGHTS, "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(path)
    state, _ = peft_folders.read(tmp_path, base)
    assert name in tensors and list(state) == ["lm_head.lora_A", "lm_head.lora_B"]
    save_file({**tensors, name: tensors[name].bfloat16()}, path)
    assert peft_folders.read(tmp_path, base)[0].equal(state)
    for changed in (tensors[name] * 1.01, tensors[name][:-1].clone()):
        save_file({**tensors, name: changed}, path)
        with pytest.raises(UserError, match=r"weights for lm_head.weight that are not those of the base"):
            peft_folders.read(tmp_path, base)


def test_what_is_written_is_what_the_oldest_supported_peft_knows(tmp_path):
    """The keys of LoraConfig in PEFT 0.18.0."""
    base, structure, state = make()
    models.write(tmp_path / "a", state, structure, base, "")
    known = {
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out",
        "bias", "use_rslora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern",
        "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "trainable_token_indices", "loftq_config",
        "eva_config", "corda_config", "use_dora", "alora_invocation_tokens", "use_qalora", "qalora_group_size",
        "layer_replication", "lora_bias", "target_parameters", "arrow_config", "ensure_weight_tying",
    }  # fmt: skip
    assert json.loads((tmp_path / "a" / peft_settings.CONFIG).read_text()).keys() <= known
