"""A merged export is the model that was scored: with a head of its own, the base's tokenizer, greedy decoding, for
transformers 4.57 as well; and what is another model is not written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_base
import torch
import transformers
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_fed import load_client
from llm_fed.basics.errors import UserError
from llm_fed.experiment import run as experiment
from llm_fed.export import folding, merged, model_files, older
from llm_fed.models.lora import Lora
from llm_fed.settings import configfile

TOKENIZER = {  # files that a tokenizer might have, and that transformers would write in another way or not at all
    "special_tokens_map.json": '{"eos_token":   "</s>"}', "added_tokens.json": "{ }", "vocab.json": '{"a":0}',
    "merges.txt": "#version", "tokenizer.model": "\x00\x01", "chat_template.jinja": "{{ messages[0].content }}\n",
    "preprocessor_config.json": "{ }", "LICENSE": "Llama 2", "additional_chat_templates/tools.jinja": "{{ 1 }}",
}  # fmt: skip
OTHER = ("optimizer.pt", "training_args.bin", "pytorch_model.bin", "model.safetensors.index.json.old", ".gitattributes")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tied base in a folder with much beside it, whose authors recommend to sample with a penalty."""
    folder = tiny_base.folder(tmp_path_factory.mktemp("base") / "base")
    for name, text in TOKENIZER.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in OTHER:
        (folder / name).write_text("x")
    settings = {"repetition_penalty": 50.0, "no_repeat_ngram_size": 1, "suppress_tokens": [4, 7, 10], "do_sample": True,
                "temperature": 3.0, "top_k": 3, "eos_token_id": [1, 5, 8, 11], "max_length": 12, "min_new_tokens": 6,
                "forced_eos_token_id": 9, "bad_words_ids": [[5]], "pad_token_id": 0}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def run(base, small, tmp_path_factory) -> Path:
    """A run of which the head is adapted, too."""
    folder = tmp_path_factory.mktemp("run")
    config = small.config(
        folder / "c.yaml", base={"name": str(base), "dtype": "float32"}, method={"name": "local"}, rounds=1,
        local={"steps": 20}, adapter={"rank": 4, "target_modules": ["q_proj", "v_proj", "lm_head"], "dropout": 0},
    )  # fmt: skip
    experiment.train(configfile.load(config), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def whole(run) -> Path:
    """The model of one client."""
    plan = merged.plan(run, run.parent / "out", ["ada"])
    (folder,) = plan.write()
    return folder


def test_a_tied_head_becomes_one_of_its_own(run, base, whole):
    tensors = load_file(whole / "model.safetensors")
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(
        tensors["model.embed_tokens.weight"], load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    )
    assert AutoConfig.from_pretrained(whole).tie_word_embeddings is False
    asked = [f"w{n} w{n + 1}" for n in range(20, 26)]
    expected = load_client(run / "adapters/ada", str(base)).generate(asked)
    assert any(expected) and load_client(run / "adapters/ada", str(base)).generate(asked) == expected
    model, tokenizer = AutoModelForCausalLM.from_pretrained(whole), AutoTokenizer.from_pretrained(whole)
    answers = [
        model.generate(torch.tensor([tokenizer(f"{text}\n").input_ids]), max_new_tokens=3)[0, 2:] for text in asked
    ]
    assert [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers] == expected


def test_files_of_the_tokenizer_are_copies(base, whole):
    for name in (*TOKENIZER, "tokenizer.json"):
        assert (whole / name).read_bytes() == (base / name).read_bytes(), name
    assert not {path.name for path in whole.rglob("*")} & {*OTHER}


def test_a_model_decodes_as_it_was_scored_and_not_as_its_base_recommends(run, base, small, whole, llm_fed):
    said = json.loads((whole / "generation_config.json").read_text())
    said.pop("transformers_version")
    assert said == {"do_sample": False, "eos_token_id": [1], "pad_token_id": 0}
    plain, data = run.parent / "plain", ("--data", small.data / "ada/test.jsonl")
    shutil.copytree(base, plain)
    GenerationConfig(eos_token_id=1).save_pretrained(plain)
    scores = [
        json.loads(llm_fed("eval", "--base", each, "--adapter", run / "adapters/ada", *data, "--json").out)
        for each in (base, plain)
    ]
    assert scores[0] == scores[1] and scores[0]["mean"] > 0
    of_merged = llm_fed("eval", "--base", whole, *data, "--json")
    assert json.loads(of_merged.out)["mean"] == scores[0]["mean"] and of_merged.err == ""


def test_a_merged_folder_chats_as_its_prompt_says(whole, llm_fed, monkeypatch, run, base):
    (expected,) = load_client(run / "adapters/ada", str(base)).generate(["w20 w21"])
    answers = iter(["w20 w21"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers, None) or (_ for _ in ()).throw(EOFError))
    assert llm_fed("chat", "--base", whole).out.split("\n")[0] == expected


def test_weights_that_other_layers_share_are_refused():
    model = tiny.build("llama", tie_word_embeddings=False)
    layers = model.model.layers
    layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight
    for names, refused in ((("q_proj",), True), (("v_proj", "lm_head"), False)):
        structure = Lora(2, 4.0, 0.0, names)
        if refused:
            with pytest.raises(
                UserError, match=r"a adapts model.layers.0.self_attn.q_proj, whose weights are those of"
            ):
                folding.untied(model, structure, Path("a"))
        else:
            assert folding.untied(model, structure, Path("a")) is False
    tied = tiny.build("llama", tie_word_embeddings=True)
    assert folding.untied(tied, Lora(2, 4.0, 0.0, ("lm_head",)), Path("a")) is True
    assert folding.untied(tied, Lora(2, 4.0, 0.0, ("q_proj",)), Path("a")) is False


FAULTS = {
    "nothing is folded in": ("fold", lambda *_: None, "logits are not those of base and adapter"),
    "another tokenizer": ("tokenizer", None, "divides a text into other tokens"),
    "another way to decode": ("decoding", None, "greedy answer is not that of base and adapter"),
    "another configuration": ("configuration", None, "logits are not those of base and adapter"),
    "half of the weights": ("weights", None, "the merged model cannot be loaded"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_model_is_not_written(run, llm_fed, tmp_path, monkeypatch, fault):
    what, fold, said = FAULTS[fault]
    real = model_files.write

    def write(folder: Path, *args: object) -> None:
        real(folder, *args)  # type: ignore[arg-type]
        if what == "tokenizer":
            path = folder / "tokenizer.json"
            path.write_text(
                path.read_text().replace('"w20"', '"x20"').replace('"w21"', '"w20"').replace('"x20"', '"w21"')
            )
        if what == "decoding":
            GenerationConfig(repetition_penalty=50.0, eos_token_id=1, pad_token_id=0).save_pretrained(folder)
        if what == "configuration":
            settings = json.loads((folder / "config.json").read_text())
            settings["rope_parameters"]["rope_theta"] = settings["rope_theta"] = 3.0
            (folder / "config.json").write_text(json.dumps(settings))
        if what == "weights":
            (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-99])

    monkeypatch.setattr(model_files, "write", write)
    if fold:
        monkeypatch.setattr(merged, "fold", fold)
    failed = llm_fed("export", run, tmp_path / "out", "--merged", "--client", "ada")
    assert failed.code == 1 and f"{tmp_path / 'out/ada'} is not written: the merged model" in failed.err
    assert said in failed.err and list((tmp_path / "out").iterdir()) == []


def with_base(run: Path, folder: Path, **settings: Any) -> None:
    """Copy a run and its base, whose config.json says more."""
    shutil.copytree(run, folder / "run")
    config = yaml.safe_load((folder / "run/config.yaml").read_text())
    shutil.copytree(config["base"]["name"], folder / "base")
    known = json.loads((folder / "base/config.json").read_text())
    (folder / "base/config.json").write_text(json.dumps(known | settings))
    config["base"]["name"] = str(folder / "base")
    (folder / "run/config.yaml").write_text(yaml.safe_dump(config))


def test_a_base_that_is_quantised_or_a_full_disk_is_refused_beforehand(run, llm_fed, tmp_path, monkeypatch):
    with_base(run, tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    refused = llm_fed("export", tmp_path / "run", tmp_path / "out", "--merged")
    refused.assert_refused("are quantised, and an adapter cannot be merged", "leave out --merged")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 1, 8))
    refused = llm_fed("export", run, tmp_path / "new/out", "--merged")
    refused.assert_refused(f"B do not fit into {tmp_path}, where 8 bytes are free; name fewer with --client", code=1)


OLD = {  # by family what version 4 reads of what version 5 writes
    "llama": ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
    "qwen3": (
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "gpt_neox": (
        {"rope_theta": 99.0, "partial_rotary_factor": 0.5},
        {"rotary_emb_base": 99.0, "rotary_pct": 0.5, "partial_rotary_factor": 0.5},
    ),
    "gemma3_text": (
        {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None},
    ),
    "olmo2": (  # it allows two keys alone
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", OLD)
def test_what_version_4_reads_lies_beside_what_version_5_does(family):
    rope, expected = OLD[family]
    config = AutoConfig.for_model(family, rope_parameters=rope)
    made = older.with_older_keys(config.to_diff_dict() | {"dtype": "bfloat16"}, config)
    assert {key: made[key] for key in expected} == expected and made["torch_dtype"] == made["dtype"] == "bfloat16"
    again = AutoConfig.for_model(**made)
    read = {
        key: value for key, value in again.rope_parameters.items() if key != "type"
    }  # its older name stays beside it
    assert read == config.rope_parameters


def test_a_family_that_version_4_lacks_gets_no_older_keys():
    """Version 5 need not read them: Laguna's configuration failed at one rope_theta beside those of its layers."""
    config = AutoConfig.for_model("laguna")
    settings = json.loads(config.to_json_string())
    assert older.with_older_keys(settings, config) == settings


def test_layers_have_the_names_that_both_versions_read():
    config = AutoConfig.for_model(
        "granitemoehybrid", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    made = older.with_older_keys(config.to_dict(), config)
    assert made["layer_types"] == ["mamba", "attention"]
    assert type(config).from_dict(made).layer_types == config.layer_types


def test_what_a_base_says_for_version_4_stays(tmp_path):
    """Its own words are not replaced by ours."""
    config = AutoConfig.for_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    made = older.with_older_keys(
        {"rope_theta": 77, "rope_scaling": {"type": "default"}, "torch_dtype": "float16"}, config
    )
    assert made["rope_scaling"] == {"type": "default"} and made["rope_theta"] == 77


@pytest.mark.parametrize("written", ["5.2.0", "4.58.0.dev0", "4.40.0", None])
def test_a_family_that_version_4_lacks_is_named_with_a_version(written):
    """That which has written it, or this one where a file was moved here by hand."""
    said = older.advice({"model_type": "new", "transformers_version": written})
    needed = written if written in ("5.2.0", "4.58.0.dev0") else transformers.__version__
    assert said == f"transformers 4.57 does not know new; to load it takes {needed} or newer"


LAYERS = {layers: {"rope_type": "default", "rope_theta": 1e4} for layers in ("full_attention", "sliding_attention")}
OTHER = {**LAYERS, "full_attention": {"rope_type": "default", "rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("family", "rope", "why"),
    [
        ("nemotron", {"rope_type": "yarn", "factor": 2.0}, "does not know rotary embeddings of nemotron"),
        ("olmo", {"rope_type": "yarn", "factor": 2.0}, "of olmo with rope_type=yarn"),
        ("olmo", {"rope_type": "linear", "factor": 2.0}, ""),
        ("llama4_text", {"rope_type": "linear", "factor": 2.0}, "of llama4_text with rope_type=linear"),
        ("deepseek_v3", {"rope_type": "longrope"}, "knows no longrope of deepseek_v3 without a factor"),
        ("longcat_flash", {"rope_type": "longrope"}, "of longcat_flash without a factor"),
        ("phi3", {"rope_type": "longrope", "factor": 2.0}, "knows no factor of the longrope of phi3"),
        ("olmo3", OTHER, "knows one rope_theta for all layers of olmo3"),
        ("olmo3", LAYERS, ""),
        ("gemma3_text", OTHER, ""),
        ("gemma3_text", {**LAYERS, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}, "does not scale the"),
        ("llama", {"rope_type": "yarn", "factor": 2.0}, ""),
        ("llama", {"partial_rotary_factor": 0.5}, "does not know rotary embeddings of llama on a part of each head"),
        ("llama", {"partial_rotary_factor": 1.0}, ""),
        ("phi", {"partial_rotary_factor": 0.5}, ""),
        (
            "phimoe",
            {"rope_type": "longrope"},
            "reads texts beyond original_max_position_embeddings of phimoe",
        ),
    ],
)
def test_what_version_4_would_read_otherwise_is_told(family, rope, why):
    settings = {"model_type": family, "rope_parameters": rope, "transformers_version": "5.20.0"}
    for whole in (settings, {"model_type": "gemma3", "text_config": settings}):  # also where it is a part of a model
        said = older.advice({"transformers_version": "5.20.0", **whole})
        assert (why in said and said.endswith("to load it takes 5.20.0 or newer")) if why else not said


@pytest.mark.parametrize(
    ("installed", "settings", "expected"),
    [
        (
            "5.23.0",
            {"model_type": "mamba2", "n_groups": 2},
            "over all groups of mamba2; to load it takes 5.23 or newer",
        ),
        ("5.23.0", {"model_type": "mamba2", "n_groups": 1}, ""),
        ("5.22.0", {"model_type": "mamba2", "n_groups": 2}, ""),  # which takes one norm over all, too
        ("5.23.0", {"model_type": "zamba2"}, "reads texts of more than chunk_size tokens with zamba2 in another way"),
        ("5.23.0", {"model_type": "dbrx"}, "does not read a config.json of dbrx that version 5 has written"),
        ("5.23.0", {"model_type": "dbrx", "transformers_version": "4.57.0"}, ""),
    ],
)
def test_what_else_version_4_would_read_otherwise_is_told(installed, settings, expected, monkeypatch):
    monkeypatch.setattr(older, "version", lambda _: installed)
    said = older.advice({"transformers_version": "5.20.0", **settings})
    assert expected in said and bool(said) == bool(expected)


def test_attention_that_version_4_does_not_cap_is_told():
    said = older.advice({"model_type": "gemma2", "attn_logit_softcapping": 50.0})
    assert 'gemma2 only if it is loaded with attn_implementation="eager"' in said
    assert not older.advice({"model_type": "gemma3_text", "attn_logit_softcapping": None})


def test_a_tokenizer_of_version_5_is_written_for_both():
    known = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"], "pad_token": "<pad>"}
    assert older.tokenizer_settings(known) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"], "pad_token": "<pad>",
    }  # fmt: skip
    of_version_4 = {"tokenizer_class": "LlamaTokenizer", "extra_special_tokens": {"image_token": "<i>"}}
    assert older.tokenizer_settings(of_version_4) == of_version_4


def test_settings_of_decoding_in_config_json_do_not_stay(run, tmp_path, llm_fed):
    """As older models have them; transformers 5 would refuse to save them."""
    more = {
        "max_length": 4096,
        "repetition_penalty": 1.3,
        "task_specific_params": {"text-generation": {"do_sample": True}},
    }
    with_base(run, tmp_path, **more, _name_or_path="/home/me", auto_map={"AutoConfig": "a.B"})
    assert llm_fed("export", tmp_path / "run", tmp_path / "out", "--merged", "--client", "ada").code == 0
    written = json.loads((tmp_path / "out/ada/config.json").read_text())
    assert not {*more, "_name_or_path", "auto_map"} & written.keys()
