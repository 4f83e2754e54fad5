"""Whole models of clients: the base of a run with a client's adapter folded into its weights, for use without PEFT."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub.errors import HfHubHTTPError
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
from llm_fed.models.base import Base
from llm_fed.models.loading import DTYPES, attention, check_name, explain, read_settings, read_tokenizer, settle_dtype
from llm_fed.models.prompt import FILE, prompt_for
from llm_fed.runs.reading import read_config
from llm_fed.settings.config import BaseConfig, Config


@dataclass(frozen=True)
class ExportPlan:
    """What will be written, checked as far as can be without loading the base.

    Attributes:
        adapters: by client its adapter.
        sizes: by client the bytes of its model.
        free: bytes that are free where the models go.
        notes: what the user should know beforehand, a line each.
        gguf: whether each is a GGUF file, beside one of the base.
    """

    base: BaseConfig
    adapters: Mapping[str, Path]
    out: Path
    sizes: Mapping[str, int]
    free: int
    notes: Sequence[str] = ()
    gguf: bool = False

    @property
    def said(self) -> str:
        """The room that it takes, and the notes."""
        count, largest = len(self.adapters) + self.gguf, max(self.sizes.values())
        many = f"{count} models, {_size(largest)} each" if count > 1 else f"a model of {_size(largest)}"
        return "\n".join((f"writing {many} ({self.base.dtype}); {_size(self.free)} are free", *self.notes))

    def write(self) -> Iterator[Path]:
        """Write one model after another, and yield its folder. The base is loaded anew for each, since folding changes
        it; and each folder is loaded anew, and must compute what base and adapter do. With `gguf` the base's own file
        comes first.

        Raises:
            UserError: the base cannot be loaded, or an adapter is damaged or does not fit it.
            RunError: the disk is full, a folder cannot be written, or it would be another model.
        """
        if self.gguf:
            yield self._write_base()
        for client, adapter in self.adapters.items():
            target, partial = self.out / client, self.out / f".{client}.partial"
            try:
                self._write(client, adapter, partial)
                sync_files(path for path in partial.rglob("*") if path.is_file())
                put_folder(partial, target)
                sync_folder(self.out)
            except (OSError, SafetensorError, HfHubHTTPError) as error:
                raise RunError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from error
            except RunError as error:
                raise RunError(f"{target} is not written: {error}") from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            yield target

    def _write_base(self) -> Path:
        """Write the base's GGUF file, which the adapters of `export --gguf` fit."""
        base = load_base(self.base, "cpu")
        prompt = prompt_for(base, next(iter(self.adapters.values())))
        assert prompt is not None  # as in `_write`
        target, partial = self.out / gguf_files.BASE, self.out / f".{gguf_files.BASE}.partial"
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            gguf_files.model(partial, base, prompt)
            partial.chmod(0o600)
            sync_files([partial])
            partial.replace(target)
            sync_folder(self.out)
        except OSError as error:
            raise RunError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
        return target

    def _write(self, client: str, adapter: Path, folder: Path) -> None:
        """Fold one adapter in, write the model to a folder, and check it."""
        base = load_base(self.base, "cpu")
        prompt = prompt_for(base, adapter)
        assert prompt is not None  # `plan` has seen to it
        state, structure = peft_folders.read(adapter, base)
        base.prompt = prompt
        try:
            with signs.part(f"answers of {client}'s adapter, to compare"):
                probes = proof.probe(base, structure, state, prompt)
        except RunError:
            fold(base.model, structure, state, adapter)  # weights that become infinite explain it better
            raise
        fold(base.model, structure, state, adapter)
        remove(folder)
        folder.mkdir(mode=0o700, parents=True)
        if self.gguf:
            gguf_files.model(folder / gguf_files.MODEL, base, prompt)
        else:
            model_files.write_weights(folder, base, prompt)
            model_files.write(folder, base, self.base, prompt)
        card = read_file(adapter / peft_folders.CARD).decode(errors="replace")
        (folder / peft_folders.CARD).write_text(merged_card(card, self._described(base)), encoding="utf-8")
        (folder / FILE).write_bytes(public_content(adapter / FILE) or b"")
        with signs.part(f"checking the model of {client}"):
            if self.gguf:
                config, base.model = base.model.config, None  # before the other one is loaded
                gguf_files.check(folder / gguf_files.MODEL, probes, base, config, prompt)
            else:
                del base
                proof.check(folder, probes, self.base)

    def _described(self, base: Base) -> Model:
        origin = base.source
        shown = wording.GGUF if self.gguf else wording.MERGED
        return Model(origin.name, shown, prompt=base.prompt, dtype=self.base.dtype, revision=origin.revision)


def plan(folder: Path, out: Path, clients: Sequence[str] = (), gguf: bool = False) -> ExportPlan:
    """What `llm-fed export --merged` will do with the adapters of a finished run.

    Args:
        gguf: whether the models are to be GGUF files.

    Raises:
        UserError: see `copies.handed_out`; or these are no single adapters of a language model in full precision, or
            they change weights that several layers share, or `out` holds such a folder already, or llama.cpp does not
            know the base's architecture or tokenizer.
        RunError: the disk has no room for them.
    """
    config, adapters = read_config(folder), handed_out(folder, clients)
    for path in adapters.values():
        _check(config, path)
    for target in [*(out / client for client in adapters), *([out / gguf_files.BASE] if gguf else [])]:
        if target.exists():
            raise UserError(f"{target} already exists; delete it, or give another folder")
    location = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    base, _ = settle_dtype(replace(config.base, device_map=None, activation_checkpointing=False), "cpu")
    model = skeleton(base)
    _check_unquantised(base, model)
    if gguf:
        base = replace(base, dtype="float32")  # a sum that is not rounded; llama.cpp makes smaller files of it
        Architecture.of(model.config.get_text_config())
        gguf_tokens.check(read_tokenizer(base)[0])
    plain, heads = _bytes(model.parameters(), base), _bytes([_head(model)], base)
    parted = [
        client for client, path in adapters.items() if untied(model, peft_settings.read(path).structure(model), path)
    ]
    sizes = {client: plain + heads * (client in parted) for client in adapters}
    free, notes = shutil.disk_usage(location).free, []
    if parted:
        whose = f"{', '.join(parted[:5])}{', ...' if parted[5:] else ''}"
        notes.append(
            f"the adapter of {whose} changes the head, which in this base is the embedding, too: both are written "
            f"(tie_word_embeddings=false), which takes {_size(heads)} more"
        )
    if not gguf and (said := older.advice(model_files.settings_read(base))):
        notes.append(said)
    planned = ExportPlan(base, adapters, out, sizes, free, notes, gguf)
    if sum(sizes.values()) + plain * gguf > free:
        raise RunError(
            f"{len(adapters) + gguf} models of {_size(max(sizes.values()))} do not fit into {location}, where "
            f"{_size(free)} are free; name fewer with --client, or give another folder"
        )
    return planned


def needed_version(base: BaseConfig) -> str:
    """The version of transformers that loads a model made of this base, or nothing if 4.57 does."""
    return older.needed_version(model_files.settings_read(base))


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


def skeleton(base: BaseConfig) -> PreTrainedModel:
    """The base without weights, from its configuration alone.

    Raises:
        UserError: it cannot be made.
    """
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


def _check_unquantised(base: BaseConfig, model: PreTrainedModel) -> None:
    if getattr(model.config, "quantization_config", None):
        raise UserError(
            f"the weights of base.name={base.name!r} are quantised, and an adapter cannot be merged into quantised "
            "weights; leave out --merged, and load the adapters on the base"
        )


def _head(model: PreTrainedModel) -> torch.Tensor:
    return model.get_output_embeddings().weight


def _bytes(parameters: Iterable[torch.Tensor], base: BaseConfig) -> int:
    """What these weights take in the base's dtype."""
    return sum(parameter.numel() for parameter in parameters) * DTYPES[base.dtype].itemsize


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
