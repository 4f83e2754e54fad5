"""What a source declares beside its cells, as the library datasets writes it: into Arrow and Parquet files, beside the
files of a saved data set, and at the head of a README. Features are what `datasets.Features.to_dict` makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fed.basics.documents import Json, load, load_json
from llm_fed.basics.errors import UserError, one_line
from llm_fed.basics.files import read_file
from llm_fed.rows.layout import Part, split_of

if TYPE_CHECKING:
    import pyarrow

    from llm_fed.rows import Cell, Source

README = "README.md"


def with_names(values: Mapping[str, Cell], features: Mapping[str, Json]) -> dict[str, Cell]:
    """A row with the names of classes instead of their numbers; -1 is none. ValueError: a number has no name."""
    named = dict(values)
    for column in features.keys() & named.keys():
        try:
            named[column] = _named(named[column], features[column])
        except ValueError as error:
            raise ValueError(f"column {column!r} holds {error}") from error
    return named


def _named(value: Cell, feature: Json) -> Cell:
    """A cell with the names of the classes that it, or what is in it, is said to be."""
    inner = feature[0] if isinstance(feature, list) else feature
    if isinstance(feature, dict):
        inner = feature.get("feature", feature)
    if isinstance(value, list):
        return [_named(each, inner) for each in value]
    if isinstance(value, dict):
        fields = inner if isinstance(inner, dict) else {}
        return {key: _named(each, fields.get(key)) for key, each in value.items()}
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    return _name(value, names) if isinstance(names, list) and names and value not in (None, "") else value


def _name(value: Cell, names: list[str | None]) -> str | None:
    if isinstance(value, str) and value in names:
        return value
    try:
        number = int(float(value if isinstance(value, str | int | float) else "nan"))
    except (OverflowError, ValueError):
        number = len(names)
    if number == -1:
        return None
    if not 0 <= number < len(names) or names[number] in (None, ""):
        raise ValueError(f"{value!r:.40}, but the data set names {len(names)} classes")
    return names[number]


def of_schema(source: Source, schema: pyarrow.Schema) -> dict[str, Json]:
    """By column the features that are written into an Arrow or Parquet file."""
    written = (schema.metadata or {}).get(b"huggingface")
    try:
        return dict(load_json(written)["info"]["features"]) if written else {}
    except (KeyError, TypeError, ValueError):
        source.remark("without what its metadata says of its columns")
        return {}


def shown(path: Path) -> list[str] | None:
    """The columns of a saved data set (`save_to_disk`) that its format does not hide; None: all."""
    try:
        state = load_json(read_file(path.parent / "state.json"))
        return None if state["_output_all_columns"] else state["_format_columns"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def of_readme(folder: Path) -> tuple[dict[str, Json], list[Part]]:
    """By column the features that the README of a data set says, and which of its files are in which split; empty where
    it does not say that of one configuration. UserError: it says so in a form that cannot be read."""
    path = folder / README
    head = read_file(path).decode(errors="ignore").partition("\n---")[0]
    head = head if head.startswith("---") else ""
    if not ("dataset_info:" in head or "configs:" in head):
        return {}, []
    from datasets.info import DatasetInfosDict

    try:
        card: Any = load(head.strip("-")) or {}
        configs = card.get("configs") or [{}]
        infos = [info.features for info in DatasetInfosDict.from_dataset_card_data(card).values() if info.features]
        parts = _parts(folder, configs[0].get("data_files") or []) if len(configs) == 1 else []
    except Exception as error:  # of any kind: whatever a person may write there
        said = one_line(str(error))
        raise UserError(
            f"{path} says what the data are in a form that cannot be read: {said}; correct it, or take it out"
        ) from error
    return (infos[0].to_dict() if len(infos) == 1 else {}), parts


def _parts(folder: Path, listed: str | list[Any]) -> list[Part]:
    parts = []
    for each in (each for each in listed if isinstance(each, dict) and split_of(each["split"])):
        patterns = [each["path"]] if isinstance(each["path"], str) else each["path"]
        files = tuple(
            str(path.relative_to(folder))
            for pattern in patterns
            for path in sorted(folder.glob(pattern))
            if path.is_file()
        )
        if not files:
            raise ValueError(f"{', '.join(patterns)} of the split {each['split']} are no files")
        parts.append(Part(None, str(split_of(each["split"])), files))
    return parts
