"""Which file belongs to which client and split: names in, a plan out. No file is opened here.

    north.jsonl, south.csv                                        a file per client
    north-train.csv, north-test.csv                               split files per client; also train-north.csv
    north/train.jsonl, north/test.jsonl, south/2024.jsonl         a folder per client
    train/north.jsonl, test/north.jsonl                           a folder per split
    train.jsonl, test.csv, dev.jsonl                              the splits of all; a column says whose a row is
    data/train-00000-of-00002.parquet, default/train/0000.parquet     the same in shards, as on the Hub
    north-train-00000-of-00002.parquet, north/data/train-...      shards of one client
    site=north/year=2024/part-0.parquet                           keys as Hive writes them, which are columns, too

Where a column of the rows names the clients (`joined`), the names of files only say the split.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError
from llm_fed.basics.names import composed
from llm_fed.rows import formats

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
DEEPEST = 5  # folders within folders that are looked into
_SPLIT_OF = {word: split for split, words in SPLIT_NAMES.items() for word in words}
_WORD = f"(?P<word>{'|'.join(_SPLIT_OF)})"
_FLAGS = re.IGNORECASE | re.DOTALL
_SHARD = re.compile(
    r"(?:(?P<rest>.+)[-_.])?(?P<number>\d{1,9})[-_.]of[-_.](?P<total>\d{1,9})(?:[-_.][0-9a-f]{8,})?", _FLAGS
)
_PART = re.compile(r"(?:part|shard|chunk)[-_. ]?(?P<number>\d{1,9})(?:[-_.].*)?", _FLAGS)  # Spark's, too
_AT_END = re.compile(rf"(?:(?P<rest>.+)[-_. ])?{_WORD}", _FLAGS)
_NUMBERED = re.compile(rf"(?:(?P<rest>.+)[-_. ])?{_WORD}[-_. ]?(?P<number>\d{{1,9}})", _FLAGS)
_ANYTHING = ("data", "dataset", "default", "all")  # names that say nothing
# What systems leave behind, and what `datasets` writes beside data.
_SILENT = re.compile(
    r"\.DS_Store|Thumbs\.db|desktop\.ini|\._.*|\.git.*|\.cache|__MACOSX|\.ipynb_checkpoints|__pycache__|~\$.*"
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json",
    _FLAGS,
)
_PAPERS = re.compile(r"(?:readme|licen[cs]e|notice|changelog|copying|citation|requirements)\b.*", _FLAGS)
_KEY = re.compile(r"([^\W\d]\w*)=(.+)", re.DOTALL)
_DIGITS = re.compile(r"(\d{1,18})")  # of thousands of digits Python makes no number


@dataclass(frozen=True)
class Part:
    """Files whose rows belong together."""

    client: str | None  # None: a column says, or a partition
    split: str  # train, validation or test
    files: tuple[str, ...]
    named: bool = True  # whether names say the split; else it is `train` because they say none


@dataclass(frozen=True)
class FolderLayout:
    """What each file is for; names are as they came in."""

    parts: tuple[Part, ...]
    unused: tuple[str, ...] = ()  # files, and folders (`name/`) that hold none
    key: str = ""  # by whose values in the names of folders the clients are called
    features: Mapping[str, Json] = field(default_factory=dict)  # of the columns, as a README says

    def keys(self, path: str) -> dict[str, str]:
        """What the folders of a file say of its rows beside client and split."""
        return {key: value for key, value in keys_of(path).items() if key != self.key and not _is_split(key, value)}


@dataclass
class _File:
    """A file of data, and what names say of it."""

    path: str
    folders: list[str]
    stem: str
    is_text: bool
    split: str | None = None
    rest: str | None = None  # what its name says besides split and shard; None: nothing
    shard: tuple[int, int] | None = None  # its number and how many there are, 0 where that is not said
    client: str | None = None
    in_folder: bool = False  # whether a folder names the client
    among: str = ""  # folders that say neither client nor split

    @classmethod
    def of(cls, path: str) -> _File | None:
        """`north-train`, `train-00000-of-00002`, `part-00000`, or a name that says neither; None of what is no data."""
        *folders, name = path.split("/")
        kind = formats.kind_of(name)
        hidden = len(folders) > DEEPEST or any(part.startswith(".") for part in (*folders, name))
        if kind is None or hidden or (kind == "txt" and _PAPERS.fullmatch(name)):
            return None
        stem = composed(formats.parts_of(name)[0])
        file = cls(path, folders, stem, kind == "txt")
        if part := _PART.fullmatch(stem):
            file.shard = int(part["number"]), 0
            return file
        if match := _SHARD.fullmatch(stem):
            stem, file.shard = match["rest"] or "", (int(match["number"]), int(match["total"]))
        if match := _AT_END.fullmatch(stem):
            file.split, stem = split_of(match["word"]), match["rest"] or ""
        elif file.shard and stem.casefold() in _ANYTHING:
            stem = ""
        file.rest = stem if stem and not file.is_text else None
        return file


@dataclass(frozen=True)
class _FolderLabels:
    """What the folders above say."""

    where: str
    joined: bool
    key: str
    client: str | None = None
    split: str | None = None
    among: str = ""


def plan(
    names: Iterable[str], where: str, *, joined: bool = False, client: str | None = None, said: Sequence[Part] = ()
) -> FolderLayout:
    """Whose the files of a folder are, of their paths within it; of a folder without files its path and a "/".
    UserError for a client without training data, shards that are missing, two files that say the same of themselves, or
    files of clients beside files of all. `joined`: a column of the rows names the clients. `client`: whose the whole
    folder is, where that is known. `said`: which files are in which split, as a README says; if names say otherwise, it
    counts, and the files are those of all clients."""
    silent = _SILENT.fullmatch
    listed = sorted((name for name in names if not any(map(silent, name.split("/")))), key=natural_order)
    files = [file for name in listed if (file := _File.of(name))]
    if not all(file.is_text for file in files):
        files = [file for file in files if not file.is_text]
    key = "" if joined or client else _naming(files, where)
    folders = defaultdict[tuple[str, ...], list[_File]](list)
    for file in files:
        folders[tuple(file.folders)].append(file)
    try:
        for own in folders.values():  # the names in one folder say of each other what they mean
            if not _read_words(own, joined):
                _read_numbers(own)
        _place(files, _FolderLabels(where, joined, key, client))
        _check_same(files, where)
        parts = list(_parts(_without_bystanders(files, where, joined), where))
    except UserError:
        if not said:
            raise
        parts = []
    found = {(part.split, name) for part in parts for name in part.files}
    if not {(part.split, name) for part in said for name in part.files} <= found:
        parts, key = [*said], ""
    used = {name for part in parts for name in part.files}
    return FolderLayout(tuple(parts), tuple(name for name in listed if name not in used), key)


def split_of(word: str) -> str | None:
    """The split that a word stands for, in any case; None: it stands for none."""
    return _SPLIT_OF.get(word.casefold())


def keys_of(path: str) -> dict[str, str]:
    """The keys with their values in the names of the folders above a file, as Hive writes them (`site=north`)."""
    pairs = (_KEY.fullmatch(folder) for folder in path.split("/")[:-1])
    return {pair[1]: unquote(pair[2]) for pair in pairs if pair}


def _is_split(key: str, value: str) -> bool:
    return key == "split" and split_of(value) is not None


def _naming(files: Iterable[_File], where: str) -> str:
    """The key whose values are the clients' names; UserError where it might be another, too."""
    pairs = [pair for file in files for pair in keys_of(file.path).items()]
    keys = list(dict.fromkeys(key for key, value in pairs if not _is_split(key, value)))
    named = [key for key in keys if key.casefold() in ("client", "client_id")] or keys
    if len(named) > 1:
        raise UserError(
            f"{where}: its folders have the keys {' and '.join(keys)}; say which names the clients: set "
            f"task.columns.client={keys[0]}"
        )
    return named[0] if named else ""


def natural_order(name: str) -> list[str | int]:
    """A sort key by which client2 comes before client10."""
    return [int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(name))]


def _inside(files: Sequence[_File], depth: int) -> tuple[list[_File], dict[str, list[_File]]]:
    """The files of a folder, and by name those of the folders in it; all lie at least `depth` folders deep."""
    inner = defaultdict[str, list[_File]](list)
    for file in files:
        if len(file.folders) > depth:
            inner[file.folders[depth]].append(file)
    return [file for file in files if len(file.folders) == depth], inner


def _place(files: Sequence[_File], above: _FolderLabels, depth: int = 0) -> None:
    """Add to files what the folders above them say, of whose names `depth` are read."""
    own, folders = _inside(files, depth)
    trains, alone = _trains(own, folders), len(folders) == 1 and not own
    for file in own:
        _label(file, above)
    for name, inner in folders.items():
        pair = keys_of(f"{name}/")
        split = split_of(pair.get("split", name))
        says_splits = _says_splits(inner, depth + 1)
        if split and above.split is None and (trains or not says_splits):
            labels = replace(above, split=split)
        elif alone and name.casefold() in _ANYTHING:
            labels = above
        elif above.key in pair:
            labels = replace(above, client=composed(pair[above.key]))
        elif above.client or above.joined or pair or (alone and not above.split and not says_splits):
            labels = replace(above, among=f"{above.among}{name}/")
        else:
            labels = replace(above, client=composed(name))
        _place(inner, labels, depth + 1)


def _trains(files: Iterable[_File], folders: Iterable[str]) -> bool:
    return "train" in map(split_of, folders) or any(file.split == "train" and file.rest is None for file in files)


def _says_splits(files: Sequence[_File], depth: int) -> bool:
    """Whether a folder holds training data by name, as that of a client does."""
    own, folders = _inside(files, depth)
    if len(folders) == 1 and not own and {*map(str.casefold, folders)} <= {*_ANYTHING}:
        return _says_splits(files, depth + 1)
    return _trains(own, folders)


def _label(file: _File, above: _FolderLabels) -> None:
    if above.split:
        if file.split not in (None, above.split) and not above.joined:
            raise UserError(
                f"{above.where}: the folder of {file.path} says {above.split}, its name {file.split}; rename one"
            )
        if file.rest is not None and file.rest.isdecimal():
            file.shard, file.rest = (int(file.rest[:18]), 0), None
        elif file.rest is not None and file.rest.casefold() in _ANYTHING:
            file.rest = None
    file.split = file.split or above.split
    file.client, file.in_folder, file.among = above.client, above.client is not None, above.among
    if not file.in_folder and not above.joined:
        file.client = file.rest


def _read_numbers(files: Sequence[_File]) -> None:
    """`train-1` and `train-2` as shards, or as clients 1 and 2 where each has a test file of its number, too; names
    like `dev-1` where nothing is for training stay names."""
    unread = [file for file in files if file.split is None and file.shard is None]
    matches = [(file, match) for file in unread if (match := _NUMBERED.fullmatch(file.stem))]
    found = [(file, match, None if file.is_text else match["rest"]) for file, match in matches]
    trains = {file.rest for file in files if file.split == "train"}
    trains |= {rest for _, match, rest in found if split_of(match["word"]) == "train"}
    of_all = defaultdict[str | None, set[str]](set)
    for _, match in matches:
        if match["rest"] is None:
            of_all[split_of(match["word"])].add(match["number"])
    first, *others = of_all.values() or [set()]
    clients = len(first) > 1 and bool(others) and all(numbers == first for numbers in others)
    for file, match, rest in found:
        if rest not in trains:
            continue
        file.split, file.rest = split_of(match["word"]), rest
        if match["rest"] is None and clients:
            file.rest = match["number"]
        else:
            file.shard = int(match["number"]), 0


def _read_words(files: Sequence[_File], joined: bool) -> bool:
    """`train-north` and `test-north`, `north.train.v2` and `north.test.v2`: a word of a split in front or inside counts
    where the same name comes with `train` and another split. Whether any does. Names like `dev-team` stay names."""
    found = [(file, _words(file.rest)) for file in files if file.split is None and file.rest is not None]
    splits = defaultdict[str, set[str]](set)
    for rest, split in (word for _, words in found for word in words):
        splits[rest].add(split)
    pairs = {rest for rest, own in splits.items() if "train" in own and len(own) > 1 and not rest.isdecimal()}
    if not pairs and not (joined and any(file.split == "train" for file in files)):
        return False
    for file, words in found:
        if words:
            file.rest, file.split = next((word for word in words if word[0] in pairs), words[0])
    return True


def _words(name: str) -> list[tuple[str, str]]:
    """(rest, split) of each word of a split in front of a name or inside it."""
    parts = re.split(r"([-_. ])", name)
    return [
        ("".join(parts[:location] + parts[location + 2 :]), split)
        for location in range(0, len(parts) - 2, 2)
        if (split := split_of(parts[location]))
    ]


def _check_same(files: Sequence[_File], where: str) -> None:
    """Refuse two files that say the same of themselves, and shards that are missing."""
    alike = defaultdict[tuple[str | None, ...], list[_File]](list)
    for file in files:
        if not file.is_text:
            alike[file.client, file.split or "train", file.among, file.rest].append(file)
    for group in alike.values():
        seen: dict[tuple[int, int] | None, _File] = {}
        for file in group:
            other = seen.setdefault(file.shard, file)
            if other is not file or (None in seen and len(seen) > 1):
                first = other if other is not file else group[0]
                raise UserError(
                    f"{where} holds {first.path} and {file.path}, both for {file.split or 'train'}"
                    + (f" of {file.client!r}" if file.client else "")
                    + "; keep one, or name shards like train-00000-of-00002.jsonl"
                )
        if any(file.shard for file in group):
            _check_shards(group, where)


def _check_shards(group: Sequence[_File], where: str) -> None:
    totals = {file.shard[1] for file in group if file.shard}
    if len(totals) > 1:
        first, other, *_ = {file.shard[1]: file for file in group if file.shard}.values()
        raise UserError(f"{where} holds {first.path} and {other.path}, shards of two sets; keep one set")
    (total,) = totals or {0}
    numbers = {file.shard[0] for file in group if file.shard}
    start = int(0 not in numbers and total in numbers)  # some count from 1
    if missing := sorted(set(range(start, start + total)) - numbers):
        digits = len(_DIGITS.findall(group[0].stem)[-1])
        few = ", ".join(f"{number:0{digits}}-of-{total:0{digits}}" for number in missing[:5])
        raise UserError(
            f"{where} lacks {len(missing)} of the {total} shards of {group[0].path}: {few}"
            f"{', ...' if missing[5:] else ''}; add them, or rename those that are there"
        )


def _without_bystanders(files: list[_File], where: str, joined: bool) -> list[_File]:
    """Without the files that say no split where others say that they are for training."""
    of_all = [file for file in files if file.client is None and (file.rest is None or not joined)]
    by_name = [file for file in files if file.client is not None and not file.in_folder]
    by_folder = [file for file in files if file.client is not None and file.in_folder]
    trains = {file.among for file in of_all if file.split == "train"}
    mixed = ""
    if of_all and not joined and (others := [file for file in by_name if file.split or not trains] + by_folder):
        mixed = f"{of_all[0].path}, of all clients, and {others[0].path}, of one"
    elif by_name and by_folder:
        mixed = f"{by_name[0].path} and a folder of a client, {by_folder[0].path}"
    if mixed:
        raise UserError(
            f"{where} holds {mixed}; keep one of the two forms, or set task.columns.client=COLUMN, which joins all "
            "files by split"
        )
    clients = {file.client for file in by_folder if file.split == "train"}
    left = [file for file in by_folder if file.split or file.client not in clients]
    others = [file for file in files if not file.in_folder and (file.split or file.among not in trains)]
    return [*others, *left]


def _parts(files: Sequence[_File], where: str) -> Iterator[Part]:
    by_client = defaultdict[str | None, dict[str, list[_File]]](lambda: defaultdict(list))
    for file in files:
        by_client[file.client][file.split or "train"].append(file)
    for client in sorted(by_client, key=lambda name: natural_order(name or "")):
        splits = by_client[client]
        if client is None and "train" not in splits:
            first = next(iter(splits.values()))[0].path
            raise UserError(
                f"{where} has no train file beside {first}; add train.jsonl, .csv or .parquet, or give {first} another "
                "name if it is for training"
            )
        for split in SPLIT_NAMES:
            if part := splits.get(split):
                part.sort(key=lambda file: (natural_order(file.among), natural_order(file.path)))
                yield Part(client, split, tuple(file.path for file in part), any(file.split for file in part))
