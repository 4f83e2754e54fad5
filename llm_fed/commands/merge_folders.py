"""Merging any number of PEFT folders into one, by what each adds to a layer; the base is loaded only to score them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, lookup
from llm_fed.basics.files import write_folders
from llm_fed.basics.names import rounded
from llm_fed.commands.evaluate import evaluate_adapter
from llm_fed.export import factor_folders, peft_folders
from llm_fed.export.card import merge_card
from llm_fed.export.factor_folders import Factors
from llm_fed.export.origins import common_base, read_origin, say_differences
from llm_fed.methods import FOLDER_MERGERS
from llm_fed.models import labels
from llm_fed.models.origin import Origin
from llm_fed.models.prompt import FILE, read_prompt
from llm_fed.runs.tracking import Reporter


def merge_folders(
    folders: Sequence[Path],
    method: str,
    out: Path,
    *,
    weights: Sequence[float] | None = None,
    settings: Mapping[str, float] | None = None,
    base: str | None = None,
    scored: Sequence[str] = (),
) -> tuple[dict[str, Json], dict[str, float]]:
    """Merge PEFT LoRA folders, whoever wrote them, into the PEFT folder `out`.

    Ranks, alphas, rsLoRA, rank patterns and the layers themselves may differ: an adapter adds nothing to a layer that
    it does not have. Returns the method with its settings and each parent's weight; and where `scored` says so the
    score of each parent and of the merge, 0-100. UserError: they do not belong together, or the method has no such
    setting; or see `factor_folders.read`.

    Args:
        weights: of each, by which its product is multiplied (default: see `_shares`).
        settings: of the method, by the names of its rule's keyword arguments.
        base: its name, which is then not looked up in the folders; needed to score where they do not name it.
        scored: words of `evaluate_adapter` that say on which examples each parent and the merge are scored.
    """
    given, reporter = settings or {}, Reporter()
    rule = lookup("--method", method, FOLDER_MERGERS)
    for option in given:
        if option not in inspect.signature(rule).parameters:
            raise UserError(f"--{option} is not an option of {method}; leave it out")
    if len(folders) < 2:
        raise UserError("a merge takes at least two PEFT folders; name them one after another")
    if out.resolve() in [folder.resolve() for folder in folders]:
        raise UserError(f"{out} is one of the adapters that are merged; give another --out")
    share = _shares(method, weights, len(folders))
    origins = {str(folder): read_origin(folder) for folder in folders}
    location = base or common_base(origins)
    parents = [factor_folders.read(folder) for folder in folders]
    _check_heads(folders, parents)
    merged, lost = rule(factor_folders.aligned(parents), share, **given)
    of_each = {str(folder): weight for folder, weight in zip(folders, share, strict=True)}
    recipe: dict[str, Json] = {"method": method, **given, "weights": of_each}
    recipe |= {"lost": rounded(lost)} if lost else {}
    files = {
        **factor_folders.contents(merged, factor_folders.mean_head(parents, share), parents),
        peft_folders.CARD: merge_card(location, recipe).encode(),
        **_beside(folders, origins, reporter),
    }
    write_folders([(out, files)], peft_folders.WHAT)
    return recipe, _scores([*folders, out], location, scored, reporter) if scored else {}


def _check_heads(folders: Sequence[Path], parents: Sequence[Factors]) -> None:
    """Refuse heads of different labels or shapes."""
    heads = [{name: value.shape for name, value in parent.head.items()} for parent in parents]
    named = list(zip(map(labels.read_labels, folders), heads, strict=True))
    for folder, each in zip(folders, named, strict=True):
        if each != named[0]:
            raise UserError(
                f"{folders[0]} and {folder} have heads of different labels or layers, of which there is no mean; merge "
                "adapters of one task"
            )


def _beside(folders: Sequence[Path], origins: Mapping[str, Origin | None], reporter: Reporter) -> dict[str, bytes]:
    """The first one's prompt.json and labels.json."""
    prompts = {folder: prompt for folder in folders if (prompt := read_prompt(folder))}
    first = next(iter(prompts), folders[0])
    for folder, prompt in prompts.items():
        if (prompt.template.text, prompt.template.date) != (prompts[first].template.text, prompts[first].template.date):
            reporter.note(f"{first} and {folder} were trained with different prompt templates; that of {first} is kept")
    say_differences({str(folder): prompt for folder, prompt in prompts.items()}, origins, reporter.note)
    files = [path for path in (first / FILE, first / labels.FILE) if path.is_file()]
    return {path.name: path.read_bytes() for path in files}


def _scores(folders: Sequence[Path], base: str, words: Sequence[str], reporter: Reporter) -> dict[str, float]:
    if not base:
        raise UserError("none of the adapters names its base, so they cannot be scored; give --base NAME")
    said = {str(each): evaluate_adapter(base, each, words, reporter=reporter) for each in folders}
    return {folder: rounded(summary.mean) for folder, summary in said.items()}


def _shares(method: str, given: Sequence[float] | None, count: int) -> Sequence[float]:
    """A weight for each of `count` adapters: by default 1 over their number, or for ties, which takes a mean itself, 1.
    UserError: another number of weights, or weights that a method has no use for."""
    if given is None:
        return [1.0 if method == "ties" else 1 / count] * count
    if len(given) != count:
        raise UserError(f"--weights has {len(given)} numbers for {count} adapters; give one for each")
    if method in ("karcher", "slerp") and not (min(given) >= 0 and sum(given) > 0):
        raise UserError(f"--weights of {method} are shares of a way: none is below 0, and one is above it")
    return given
