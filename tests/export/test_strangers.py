"""Adapter folders of strangers: whatever they hold is refused in one line, and soon."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every
import fuzz
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.export import models, peft_folders, peft_settings
from llm_fed.export.origins import check_text
from llm_fed.kinds.language import load_base
from llm_fed.models import lora
from llm_fed.models.lora import Lora
from llm_fed.settings.config import BaseConfig
from llm_fed.state import State


@pytest.fixture(scope="module")
def base(small):
    return load_base(BaseConfig(name=str(small.base), dtype="float32"), "cpu")


@pytest.fixture
def adapter(finished, tmp_path) -> Path:
    """A folder as another program has written it: without a checksum."""
    shutil.copytree(finished / "adapters/ada", tmp_path / "ada")
    path = tmp_path / "ada" / peft_folders.WEIGHTS
    save_file(load_file(path), path)
    return tmp_path / "ada"


def settings(folder: Path, **changes: Any) -> None:
    path = folder / peft_settings.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path, base: Any) -> str:
    with pytest.raises(UserError) as caught:
        peft_folders.read(folder, base)
    said = str(caught.value)
    assert said.isprintable() and len(said) < 700
    return said


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"target_modules": r"(([a-z0-9_.]+)+)+[A-Z]"}, "matches no layer"),
        ({"target_modules": r"(\w|[a-z_.]|[a-z]|\.)*(?<=(.))(?!\2)\2x?"}, "took longer than"),
        ({"target_modules": "(" * 3000}, "not a valid regular expression"),
        ({"lora_alpha": 1e300}, "times the rank"),
        ({"lora_alpha": float("nan")}, "lora_alpha|alpha"),
        ({"lora_alpha": 10**400}, "not the configuration of a LoRA adapter"),
        ({"r": 0}, "rank"),
        ({"r": "2\n\x1b[31m"}, "not the configuration of a LoRA adapter"),
    ],
)
def test_settings(adapter, base, changes, what, monkeypatch):
    monkeypatch.setattr(lora, "_LONGEST", 0.05)
    settings(adapter, **changes)
    assert any(part in refused(adapter, base) for part in what.split("|"))


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_json_without_an_end(adapter, base, depth):
    (adapter / peft_settings.CONFIG).write_text('{"peft_type": ' + "[" * depth + "]" * depth + "}")
    assert "adapter_config.json" in refused(adapter, base)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int8])
def test_numbers_of_another_kind(adapter, base, dtype):
    path = adapter / peft_folders.WEIGHTS
    save_file({name: value.to(dtype) for name, value in load_file(path).items()}, path)
    assert str(dtype) in refused(adapter, base)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(adapter, base, value):
    path = adapter / peft_folders.WEIGHTS
    save_file({name: torch.full_like(tensor, value) for name, tensor in load_file(path).items()}, path)
    assert "NaN or infinite" in refused(adapter, base)


@pytest.mark.parametrize("experts", ["../x", "/etc", ".", "a ..", "", "a  b"])
def test_experts_elsewhere(adapter, base, experts):
    save_file({"x": torch.zeros(1)}, adapter / peft_folders.GATE, metadata={"gate": "sum", "experts": experts})
    assert "the name of a folder beside it" in refused(adapter, base)


def test_another_gate(adapter, base):
    save_file({"x": torch.zeros(1)}, adapter / peft_folders.GATE, metadata={"gate": "\x1b[2J", "experts": "a"})
    assert "sum, router or mix" in refused(adapter, base)


@pytest.fixture
def experts(base, tmp_path) -> Path:
    """Two experts and their router, written by another program."""
    structure = Lora(4, 8.0, 0.0, ("q_proj", "v_proj")).with_experts("global", "local", gate="router")
    models.write(tmp_path / "experts", base.draw(structure, generator(0)), structure, base, "")
    return tmp_path / "experts"


def regated(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first tensor of the gate."""
    path = folder / peft_folders.GATE
    with safe_open(path, "pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name != "checksum"}
    tensors = load_file(path)
    name = min(tensors)
    save_file({**tensors, name: change(tensors[name])}, path, metadata=metadata)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_routers_of_other_dtypes(experts, base, dtype):
    regated(experts, lambda router: router.to(dtype))
    assert str(dtype) in refused(experts, base)


def test_routers_that_are_no_numbers(experts, base):
    regated(experts, lambda router: torch.full_like(router, float("nan")))
    assert "NaN or infinite" in refused(experts, base)


def test_nothing_else_lies_beside_a_gate(experts, base):
    path = experts / peft_folders.GATE
    save_file({**load_file(path), "x": torch.zeros(1)}, path, metadata={"gate": "router", "experts": "global local"})
    assert "x lies beside its gate" in refused(experts, base)


@pytest.mark.parametrize("change", [
    {"mix.anchors": torch.zeros(3)}, {"mix.anchors": torch.zeros(0, 64)}, {"mix.anchors": torch.zeros(2, 3)},
    {"mix.scale": torch.zeros(1)}, {"mix.scale": torch.tensor(float("nan"))}, {"mix.scale": None},
])  # fmt: skip
def test_anchors_of_a_mix(base, tmp_path, change):
    """As FedDPA writes them, and changed."""
    structure = Lora(4, 8.0, 0.0, ("q_proj",)).with_experts("global", "local", gate="mix")
    state = base.draw(structure, generator(0))
    extras = {"mix.anchors": torch.ones(2, base.model.config.hidden_size), "mix.scale": torch.tensor(0.5)}
    models.write(tmp_path / "mix", State(state.layout, state.row, extras), structure, base, "")
    assert peft_folders.read(tmp_path / "mix", base)[0].extras.keys() == extras.keys()
    changed = {name: value for name, value in (extras | change).items() if value is not None}
    save_file(changed, tmp_path / "mix" / peft_folders.GATE, metadata={"gate": "mix", "experts": "global local"})
    assert peft_folders.GATE in refused(tmp_path / "mix", base)


def test_a_router_may_be_shorter_than_its_experts(experts, base):
    regated(experts, torch.Tensor.half)
    state, _ = peft_folders.read(experts, base)
    assert state.row.dtype == torch.float32


@pytest.mark.parametrize("file", [peft_folders.WEIGHTS, peft_settings.CONFIG])
def test_what_is_damaged_in_our_own_adapter_is_named(finished, base, tmp_path, file):
    """A changed weight, and a changed alpha, with which the same weights would be another model."""
    folder = tmp_path / "ada"
    shutil.copytree(finished / "adapters/ada", folder)
    if file == peft_settings.CONFIG:
        settings(folder, lora_alpha=9)
    else:
        data = bytearray((folder / file).read_bytes())
        data[-3] ^= 1
        (folder / file).write_bytes(data)
    assert str(folder / file) in refused(folder, base)


@pytest.mark.parametrize("command", ["export", "push"])
def test_links_are_not_handed_out(finished, tmp_path, llm_fed, command):
    """A run folder of somebody else, whose adapter is a link to a file of this machine."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "secret").write_text("precious")
    (tmp_path / "run/adapters/bob/notes").symlink_to(tmp_path / "secret")
    to = tmp_path / "out" if command == "export" else "anna"
    llm_fed(command, tmp_path / "run", to).assert_refused("bob/notes is a symbolic link", "replace the link")
    assert not (tmp_path / "out").exists()


def test_others_cannot_read_memories_and_adapters(finished, tmp_path, llm_fed):
    assert llm_fed("export", finished, tmp_path / "out").code == 0
    private = [finished / "adapters/ada", tmp_path / "out/ada", *(finished / "checkpoints").iterdir()]
    assert len(private) > 3 and {path.stat().st_mode & 0o777 for path in private} == {0o700}
    files = [path for folder in private for path in folder.iterdir()]
    assert len(files) > 8 and {path.stat().st_mode & 0o777 for path in files} == {0o600}


ONCE_FELL: dict[str, tuple[str, Any]] = {  # what random changes have found
    "a base that is a list": ("base_model_name_or_path", ["a"]),
    "a head that is a number": ("modules_to_save", 5),
    "heads that are lists": ("modules_to_save", [["a"]]),
}


@pytest.mark.parametrize("what", ONCE_FELL)
def test_settings_of_another_kind(adapter, base, what):
    key, value = ONCE_FELL[what]
    settings(adapter, **{key: value})
    assert "adapter_config.json" in refused(adapter, base)


@pytest.mark.parametrize("whole", [5, ["lm_head"], ["embed_tokens", "lm_head"], "lm_head"])
def test_modules_trained_whole_are_named(adapter, base, whole):
    """On an image model, and on a language model, where they are refused as what they are."""
    settings(adapter, modules_to_save=whole)
    named = ", ".join(whole) if isinstance(whole, list) else whole
    with pytest.raises(UserError, match=rf"has a classification head \({named}\), so it is for an image model"):
        check_text(adapter, BaseConfig(name="cnn"))
    with pytest.raises(UserError, match=rf"modules_to_save=\[{named}\].*not supported for a language model") as caught:
        check_text(adapter, BaseConfig(name=base.name))
    assert "image" not in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"\xff", b"[]", b"7"])
def test_what_is_copied_is_read_first(adapter, damage):
    path = adapter / peft_settings.CONFIG
    path.write_bytes(damage)
    with pytest.raises(UserError, match="adapter_config.json is absent or damaged"):
        peft_settings.public_config(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="adapter_config.json is absent or damaged"):
        peft_settings.public_config(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> fuzz.Folders:
    return fuzz.Folders(tmp_path_factory.mktemp("folders"))


def test_folders_of_any_kind_are_taken_or_refused(folders):
    """Adapters, experts and image models, changed."""
    every.passes(range(30), lambda number: fuzz.tried(folders, number))


@pytest.mark.slow
def test_many_folders_are_taken_or_refused(folders):
    with every.bounded_memory():
        every.passes(range(5000), lambda number: fuzz.tried(folders, f"many {number}"))
