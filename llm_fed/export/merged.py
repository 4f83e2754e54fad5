"""Whole models of clients: the base of a run with a client's adapter folded into its weights, for use without PEFT."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub.errors import HfHubHTTPError
from rich.filesize import decimal
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm_fed.basics import signs
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import put_folder, read_file, remove, sync_files, sync_folder
from llm_fed.export import gguf_files, gguf_tokens, model_files, older, peft_folders, peft_settings, proof
from llm_fed.export.card import merged_card
from llm_fed.export.copies import handed_out, public_content
from llm_fed.export.folding import fold, untied
from llm_fed.export.gguf_model import Architecture
from llm_fed.kinds import wording
from llm_fed.kinds.language import load_base
from llm_fed.kinds.wording import Model
from llm_fed.models.loading import DTYPES, attention, check_name, explain, read_settings, read_tokenizer, settle_dtype
from llm_fed.models.prompt import FILE, prompt_for
from llm_fed.runs.reading import read_config
from llm_fed.settings.config import BaseConfig


@dataclass(frozen=True)
class ExportPlan:
    """What will be written, checked as far as can be without loading the base.

    Attributes:
        adapters: by client its folder.
        note: what the user should know beforehand; may be empty.
        gguf: whether each is a GGUF file, beside one of the base.
    """

    base: BaseConfig
    adapters: Mapping[str, Path]
    out: Path
    note: str = ""
    gguf: bool = False

    def write(self) -> Iterator[Path]:
        """Write one model after another, and yield its folder. The base is loaded anew for each, since folding changes
        it; and each folder is loaded anew, and must compute what base and adapter do. With `gguf` the base's own file
        comes first. UserError: the base cannot be loaded, or an adapter is damaged or does not fit it. RunError: the
        disk is full, a folder cannot be written, or it would be another model."""
        for name, adapter in [(gguf_files.BASE, None)] * self.gguf + [*self.adapters.items()]:
            target, partial = self.out / name, self.out / f".{name}.partial"
            try:
                remove(partial)
                self._write(name, adapter, partial) if adapter else self._write_base(partial)
                sync_files(path for path in (partial, *partial.rglob("*")) if path.is_file())
                put_folder(partial, target)
                sync_folder(self.out)
            except (OSError, SafetensorError, HfHubHTTPError) as error:
                said = error.strerror if isinstance(error, OSError) else None
                raise RunError(f"cannot write {target}: {said or error}") from error
            except RunError as error:
                raise RunError(f"{target} is not written: {error}") from error
            finally:
                with suppress(OSError):
                    remove(partial)
            yield target

    def _write_base(self, path: Path) -> None:
        """Write the base's GGUF file, which the adapters of `export --gguf` fit."""
        base = load_base(self.base, "cpu")
        prompt = prompt_for(base, next(iter(self.adapters.values())))
        assert prompt is not None  # as in `_write`
        self.out.mkdir(parents=True, exist_ok=True)
        gguf_files.model(path, base, prompt)
        path.chmod(0o600)

    def _write(self, client: str, adapter: Path, folder: Path) -> None:
        """Fold one adapter in, write the model to a folder, and check it."""
        base = load_base(self.base, "cpu")
        prompt = prompt_for(base, adapter)
        assert prompt is not None  # `plan` has seen to it
        state, structure = peft_folders.read(adapter, base)
        base.prompt = prompt
        try:
            with signs.part(f"an answer of {client}'s adapter, to compare"):
                probed = proof.probe(base, structure, state, prompt)
        except RunError:
            fold(base.model, structure, state, adapter)  # weights that become infinite explain it better
            raise
        fold(base.model, structure, state, adapter)
        folder.mkdir(mode=0o700, parents=True)
        if self.gguf:
            gguf_files.model(folder / gguf_files.MODEL, base, prompt)
        else:
            model_files.write(folder, base, self.base, prompt)
        card, origin = read_file(adapter / peft_folders.CARD).decode(errors="replace"), base.source
        shown = wording.GGUF if self.gguf else wording.MERGED
        described = Model(origin.name, shown, prompt=prompt, dtype=self.base.dtype, revision=origin.revision)
        (folder / peft_folders.CARD).write_text(merged_card(card, described), encoding="utf-8")
        (folder / FILE).write_bytes(public_content(adapter / FILE) or b"")
        with signs.part(f"checking the model of {client}"):
            if self.gguf:
                config, base.model = base.model.config, None  # before the other one is loaded
                gguf_files.check(folder / gguf_files.MODEL, probed, base, config, prompt)
            else:
                del base
                proof.check(folder, probed, self.base)


def plan(folder: Path, out: Path, clients: Sequence[str] = (), gguf: bool = False) -> ExportPlan:
    """What `llm-fed export --merged` does with the adapters of a finished run. UserError: see `copies.handed_out`; or
    these are no single adapters of a language model in full precision, or they change weights that several layers
    share, or `out` holds such a folder already, or llama.cpp does not know the base's architecture or tokenizer.
    RunError: the disk has no room for them."""
    config, adapters = read_config(folder), handed_out(folder, clients)
    for path in adapters.values():
        peft_folders.check_one(path, "so they cannot be merged into one model; leave out --merged")
        if not (path / FILE).is_file():
            raise UserError(f"{path} is not an adapter of a language model; leave out --merged")
    if config.base.quantization:
        raise UserError(
            f"base.quantization is {config.base.quantization}, and an adapter cannot be merged into quantised weights; "
            "leave out --merged, and load the adapters on the quantised base"
        )
    for target in [*(out / client for client in adapters), *([out / gguf_files.BASE] if gguf else [])]:
        if target.exists():
            raise UserError(f"{target} already exists; delete it, or give another folder")
    base, _ = settle_dtype(replace(config.base, device_map=None, activation_checkpointing=False), "cpu")
    model = skeleton(base)
    if model.config.to_dict().get("quantization_config"):
        raise UserError(
            f"the weights of base.name={base.name!r} are quantised, and an adapter cannot be merged into quantised "
            "weights; leave out --merged, and load the adapters on the base"
        )
    if gguf:
        base = replace(base, dtype="float32")  # a sum that is not rounded; llama.cpp makes smaller files of it
        Architecture.of(model.config.get_text_config())
        gguf_tokens.check(read_tokenizer(base)[0])
    for path in adapters.values():
        untied(model, peft_settings.read(path).structure(model), path)
    size = sum(each.numel() for each in model.parameters()) * DTYPES[base.dtype].itemsize
    count, location = len(adapters) + gguf, next(each for each in (out, *out.absolute().parents) if each.is_dir())
    if size * count > (free := shutil.disk_usage(location).free):
        raise RunError(
            f"{count} models of {decimal(size)} do not fit into {location}, where {decimal(free)} are free; name fewer "
            "with --client, or give another folder"
        )
    return ExportPlan(base, adapters, out, "" if gguf else older.advice(model_files.settings_read(base)), gguf)


def skeleton(base: BaseConfig) -> PreTrainedModel:
    """The base without weights, from its configuration alone. UserError: it cannot be made."""
    name = check_name(base.name)
    try:
        settings = read_settings(name, base.revision)
        attn = attention(AutoModelForCausalLM, settings, torch.float32)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                settings, trust_remote_code=False, attn_implementation=attn
            )
    except Exception as error:  # transformers has no class of its own for what is wrong with a configuration
        raise UserError(explain(base.name, error, "a causal LM")) from error
    return model
