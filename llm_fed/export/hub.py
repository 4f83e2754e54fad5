"""Pushes the personal adapters of a finished run to the Hugging Face Hub: one PEFT repository per client, or one
for all with a folder per client."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from httpx import HTTPError
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RemoteEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import logging, validate_repo_id

from llm_fed.basics import documents
from llm_fed.basics.errors import RunError, UserError, one_line
from llm_fed.basics.files import read_file
from llm_fed.export import peft_folders
from llm_fed.export.card import repository_card
from llm_fed.export.copies import handed_out, public_content
from llm_fed.export.peft_settings import CONFIG
from llm_fed.export.tensors import read_json
from llm_fed.runs.reading import adapter_folders, read_config
from llm_fed.settings.plugins import short


def push(
    folder: Path,
    namespace: str,
    *,
    clients: Sequence[str] = (),
    private: bool = False,
    license: str | None = None,
    prefix: str | None = None,
    one_repository: bool = False,
) -> Iterator[tuple[str, bool]]:
    """Push each client's adapter folder to `namespace/<prefix>-<client>`, and yield the address of each repository and
    whether it has changed.

    A repository changes in one commit, and only where its files differ from those that are pushed: a push that was
    interrupted continues when it is given again. Files that only the Hub has stay. Endpoint, token and cache are those
    of huggingface_hub (HF_ENDPOINT, HF_TOKEN, `hf auth login`).

    Args:
        clients: only these; all if empty.
        private: new repositories are private; one that exists and is public is refused.
        license: the licence of the adapters; otherwise that of the base's model card, or "other" if it names none.
        prefix: instead of the run folder's name (with the method's, where it does not hold it).
        one_repository: all go to `namespace/<prefix>`, in which each client has a folder (PEFT's `subfolder`).

    Raises:
        UserError: no finished run, no such client, a name that the Hub does not allow, a token that is missing, refused
            or without the right to write to `namespace`, or a public repository where `private` is requested.
        RunError: the Hub cannot be reached, or does not take the files.
    """
    cards, repositories = _prepared(folder, namespace, clients, prefix, one_repository)
    token = get_token()
    if token is None:
        raise UserError("no token for the Hub: give one with hf auth login, or as HF_TOKEN in the environment")
    api = HfApi(token=token)
    with _errors(f"{api.endpoint} does not say whose token this is", denied=f"{api.endpoint} refuses the token"):
        user = api.whoami()["name"]
    hub_id = next((card.data.get("base_model") for card in cards.values()), None)
    with _errors(f"the model card of {hub_id} cannot be read", denied=f"{user} may not read {hub_id}"):
        terms, source = _terms(license, hub_id, Path(read_config(folder).base.name))
    for card in cards.values():
        for key, value in terms.items():
            card.data[key] = value
        card.text += f"\n## Licence\n\n`{terms.get('license_name') or terms['license']}`: {source}.\n"
    for repository, locations in repositories.items():
        with _errors(f"{repository} is not pushed", denied=f"{user} may not write to {repository} with this token"):
            api.create_repo(repository, private=private or None, exist_ok=True)
            before = api.model_info(repository)
            if private and not before.private:
                raise UserError(
                    f"{repository} exists and is public, but --private is given; make it private on the Hub, or give "
                    "another --prefix"
                )
            files = _files(folder, repository, locations, cards, terms)
            commit = api.create_commit(repository, files, commit_message=f"Adapters of {', '.join(locations)}"[:99])
        yield f"{api.endpoint}/{repository}", commit.oid != before.sha


def planned(
    folder: Path, namespace: str, *, clients: Sequence[str], prefix: str | None, one_repository: bool
) -> Iterator[tuple[str, list[str], int]]:
    """The address of each repository that `push` would write with these arguments, its files, and their bytes. Nothing
    is asked of the Hub, so that licence and unchanged files are not known. UserError: as in `push`, but for a token."""
    cards, repositories = _prepared(folder, namespace, clients, prefix, one_repository)
    for repository, locations in repositories.items():
        files = _files(folder, repository, locations, cards, {})
        size = sum(each.upload_info.size for each in files)
        yield f"{HfApi().endpoint}/{repository}", [each.path_in_repo for each in files], size


def _prepared(
    folder: Path, namespace: str, clients: Sequence[str], prefix: str | None, one_repository: bool
) -> tuple[dict[str, ModelCard], dict[str, dict[str, str]]]:
    """The card of each client, and by repository where in it the folder of which client goes."""
    cards = {client: _card(path) for client, path in handed_out(folder, clients).items()}
    method, name = short(read_config(folder).method["name"]), _allowed(folder.resolve().name)
    prefix, everybody = prefix or (name if method in name else f"{name}-{method}"), adapter_folders(folder)
    if one_repository:
        names = _unique(everybody)
        return cards, {_valid(f"{namespace}/{prefix}", "this run"): {client: f"{names[client]}/" for client in cards}}
    names = repository_names(namespace, prefix, everybody)
    return cards, {names[client]: {client: ""} for client in cards}


def repository_names(namespace: str, prefix: str, clients: Collection[str]) -> dict[str, str]:
    """The repository of each client: its id in the Hub's alphabet, with a hash of it where that alone is not unique.
    UserError: the Hub does not allow the namespace or the prefix, or a name is too long."""
    return {
        client: _valid(f"{namespace}/{prefix}-{name}", f"client {client}") for client, name in _unique(clients).items()
    }


def _unique(clients: Collection[str]) -> dict[str, str]:
    """Each client's id in the Hub's alphabet, in which names do not differ by case alone."""
    counts = Counter(_allowed(client).lower() for client in clients)
    names = {}
    for client in clients:
        name = _allowed(client)
        if not name or counts[name.lower()] > 1:
            name = "-".join(filter(None, (name, hashlib.sha256(client.encode()).hexdigest()[:8])))
        names[client] = name
    return names


def _valid(repository: str, whose: str) -> str:
    """The name of a repository, if the Hub allows it."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"{whose}: {one_line(str(error))} Give another NAMESPACE or --prefix.") from error
    return repository


def _allowed(name: str) -> str:
    """The name with what the Hub does not allow in one replaced or left out."""
    return re.sub(r"\.+", ".", re.sub(r"[^\w.]+", "-", name, flags=re.ASCII)).strip("-.")


def _card(folder: Path) -> ModelCard:
    try:
        text = read_file(folder / peft_folders.CARD).decode()
        if matter := REGEX_YAML_BLOCK.search(text):
            documents.read(matter[2])
        return ModelCard(text)
    except (OSError, ValueError, UserError, yaml.YAMLError) as error:
        raise UserError(f"{folder / peft_folders.CARD} is not a valid model card: {one_line(str(error))}") from error


def _terms(license: str | None, hub_id: str | None, base: Path) -> tuple[dict[str, str], str]:
    """The card's licence fields, and in words where they come from."""
    if license:
        return {"license": license}, "given when the adapter was pushed"
    data = None
    if hub_id:
        with suppress(RemoteEntryNotFoundError, RepositoryNotFoundError):  # no card, or none for this user
            data = _card(Path(hf_hub_download(hub_id, peft_folders.CARD)).parent).data
    elif (base / peft_folders.CARD).is_file():
        data = _card(base).data
    if data is None or not data.get("license"):
        return {"license": "other"}, "no licence was given, and none is to be read in a model card of the base"
    terms = {key: data.get(key) for key in ("license", "license_name", "license_link") if data.get(key)}
    return terms, "the base's licence, by its model card"


def _files(
    folder: Path,
    repository: str,
    locations: Mapping[str, str],
    cards: Mapping[str, ModelCard],
    terms: Mapping[str, str],
) -> list[CommitOperationAdd]:
    """What is pushed to a repository: adapters with these cards and without paths of this machine; and a card of its
    own, where each client has a folder in it."""
    adapters, files = adapter_folders(folder), {}
    for client, location in locations.items():
        for path in sorted(path for path in adapters[client].rglob("*") if path.is_file()):
            files[f"{location}{path.relative_to(adapters[client]).as_posix()}"] = public_content(path) or path
        files[location + peft_folders.CARD] = str(cards[client]).encode()
    first, location = next(iter(locations.items()))
    if location:  # PEFT loads one adapter of a language model from there
        settings = adapters[first] / CONFIG
        plain = settings.is_file() and not read_json(settings).get("modules_to_save")
        text = repository_card(repository, cards[first], location.rstrip("/") if plain else "", terms)
        files[peft_folders.CARD] = text.encode()
    return [CommitOperationAdd(name, data) for name, data in files.items()]


@contextmanager
def _errors(what: str, denied: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError, yaml.YAMLError) as error:
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        if not isinstance(cause, HfHubHTTPError):
            unreachable = isinstance(cause, (HTTPError, ConnectionError))
            advice = "; check the network and HF_ENDPOINT, then give the same command again" if unreachable else ""
            raise RunError(f"{what}: {one_line(str(cause))}{advice}") from error
        status, said = cause.response.status_code, one_line(cause.server_message or str(cause))
        if status in (401, 403):
            advice = "give another with hf auth login, or as HF_TOKEN"
            raise UserError(f"{denied}: {said}; {advice}") from error
        raise RunError(f"{what}, the Hub answers {status}: {said}; give the same command again to continue") from error


def quiet() -> None:
    """Keep huggingface_hub's warnings (of each unchanged repository) off the screen, unless the user asks for them."""
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
