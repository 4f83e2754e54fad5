"""Whole models of clients: the base of a run with a client's adapter folded into its weights, for use without PEFT."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from llm_fed.config import BaseConfig, Config
from llm_fed.errors import RunError, UserError
from llm_fed.export import peft_folders
from llm_fed.export.card import Model, merged_card
from llm_fed.export.copies import handed_out
from llm_fed.export.prompt import FILE, read_prompt
from llm_fed.models.loading import DTYPES, check_name, explain, load_base, settle_dtype
from llm_fed.runs.reading import read_config


@dataclass(frozen=True)
class Plan:
    """What will be written, checked as far as can be without loading the base.

    Attributes:
        adapters: by client its adapter.
        each: bytes of one model.
        free: bytes that are free where the models go.
    """

    base: BaseConfig
    adapters: Mapping[str, Path]
    out: Path
    each: int
    free: int

    @property
    def said(self) -> str:
        """The room that it takes."""
        count = len(self.adapters)
        many = f"{count} models, {_size(self.each)} each" if count > 1 else f"a model of {_size(self.each)}"
        return f"writing {many} ({self.base.dtype}); {_size(self.free)} are free"

    def write(self) -> Iterator[Path]:
        """Write one model after another, and yield its folder. The base is loaded anew for each, since PEFT changes it.

        Raises:
            UserError: the base cannot be loaded, or an adapter is damaged or does not fit it.
            RunError: the disk is full, or a folder cannot be written.
        """
        for client, adapter in self.adapters.items():
            base = load_base(self.base, "cpu")
            model = peft_folders.folded(adapter, base)
            assert isinstance(model, PreTrainedModel)
            target, partial = self.out / client, self.out / f".{client}.partial"
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(mode=0o700, parents=True)
                if (prompt := read_prompt(adapter)) is not None and model.generation_config is not None:
                    model.generation_config.eos_token_id = list(prompt.stop)
                model.save_pretrained(partial)
                # Not the one that was loaded, which has got a pad token.
                AutoTokenizer.from_pretrained(check_name(self.base.name), revision=self.base.revision).save_pretrained(
                    partial
                )
                card = (adapter / peft_folders.CARD).read_text(encoding="utf-8")
                described = Model(self.base.name, "merged", prompt=read_prompt(adapter), dtype=self.base.dtype)
                (partial / peft_folders.CARD).write_text(merged_card(card, described), encoding="utf-8")
                shutil.copyfile(adapter / FILE, partial / FILE)
                partial.rename(target)
            except (OSError, SafetensorError) as error:
                raise RunError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            yield target


def plan(folder: Path, out: Path, clients: Sequence[str] = ()) -> Plan:
    """What `llm-fed export --merged` will do with the adapters of a finished run.

    Raises:
        UserError: see `copies.handed_out`; or these are no single adapters of a language model in full precision, or
            `out` holds such a folder already.
        RunError: the disk has no room for them.
    """
    config, adapters = read_config(folder), handed_out(folder, clients)
    for client, path in adapters.items():
        _check(config, path)
        if (out / client).exists():
            raise UserError(f"{out / client} already exists; delete it, or give another folder")
    place = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    base, _ = settle_dtype(replace(config.base, device_map=None, activation_checkpointing=False), "cpu")
    found = Plan(base, adapters, out, _bytes(base), shutil.disk_usage(place).free)
    if len(adapters) * found.each > found.free:
        raise RunError(
            f"{len(adapters)} models of {_size(found.each)} do not fit into {place}, where {_size(found.free)} are "
            "free; name fewer with --client, or give another folder"
        )
    return found


def _check(config: Config, adapter: Path) -> None:
    """Refuse what no single model of a language could be."""
    if (adapter / peft_folders.GATE).is_file():
        raise UserError(
            f"{adapter} holds several adapters that a gate weighs for each prompt or token, so they cannot be merged "
            "into one model; leave out --merged"
        )
    if not (adapter / FILE).is_file():
        raise UserError(f"{adapter} is not an adapter of a language model; leave out --merged")
    if config.base.quantization:
        raise UserError(
            f"base.quantization is {config.base.quantization}, and an adapter cannot be merged into quantised weights; "
            "leave out --merged, and load the adapters on the quantised base"
        )


def _bytes(base: BaseConfig) -> int:
    """What the base's weights take, known from its configuration alone."""
    name = check_name(base.name)
    try:
        settings = AutoConfig.from_pretrained(name, revision=base.revision, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except Exception as error:  # transformers has no class of its own for what is wrong with a configuration
        raise UserError(explain(base.name, error, "a causal LM")) from error
    return sum(parameter.numel() for parameter in model.parameters()) * DTYPES[base.dtype].itemsize


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
