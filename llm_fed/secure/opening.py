"""Opening: the server takes the masks off a sum."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping

from torch import Tensor

from llm_fed.secure import keys
from llm_fed.secure.cohort import Cohort, Terms, signs
from llm_fed.secure.keys import Unsafe
from llm_fed.secure.party import Dealt, Revealed, commitment, own_mask, unlocking

Shares = dict[str, dict[int, int]]  # by whose secret it is, by point
Told = Mapping[str, Revealed]  # by client what it answered to `Party.reveal`; one that lies may say anything else


class GivenUp(Exception):
    """A sum that cannot be opened: too many clients have vanished, or one has lied."""


def open_sum(terms: Terms, prepared: Mapping[str, Dealt], alive: Collection[str], total: Tensor, told: Told) -> None:
    """Take the masks off the sum of the vectors of `alive`, (P,) int32, in place. GivenUp: why the sum stays closed.
    `prepared`: by client what it answered to `Party.prepare`. `told`: by client what it answered to `Party.reveal`;
    some may have vanished."""
    own, pairs = _unlocked(terms.cohort, alive, told)
    masks: list[tuple[bytes, int]] = []
    for name in alive:
        secret = _recovered(terms.cohort, name, own)
        if commitment(secret) != prepared[name]["own"]:
            raise GivenUp(f"the shares of {name}'s mask do not belong together")
        masks.append((own_mask(secret), -1))
    there = set(alive)
    for name in terms.present:
        beside = there.intersection(terms.neighbours(name))
        if name in there or not beside:  # who has vanished has a mask with each of these
            continue
        private = keys.private_of(_recovered(terms.cohort, name, pairs))
        if keys.public_of(private).hex() != prepared[name]["public"]:
            raise GivenUp(f"the shares of {name}'s key do not belong together")
        for other in beside:
            public = bytes.fromhex(prepared[other]["public"])
            masks.append((keys.agreed(private, public, terms.digest), -signs(other, name)))
    keys.add_streams(total, masks)


def _unlocked(cohort: Cohort, alive: Collection[str], told: Told) -> tuple[Shares, Shares]:
    """The shares of own masks and of keys that could be unlocked."""
    locks: Shares = defaultdict(dict)
    for holder, said in told.items():
        for name, share in _numbers(cohort, holder, said.get("locks")).items():
            locks[name][cohort.point(holder, name)] = share
    own: Shares = defaultdict(dict)
    pairs: Shares = defaultdict(dict)
    for holder, said in told.items():
        if len(locks[holder]) >= cohort.threshold:
            lock = unlocking(_recovered(cohort, holder, locks))
            for name, share in _numbers(cohort, holder, _opened(lock, said.get("locked"))).items():
                kind = own if name in alive else pairs
                kind[name][cohort.point(holder, name)] = share
    return own, pairs


def _opened(lock: bytes, locked: str | None) -> dict[str, str] | None:
    """What one client has locked; nothing where it is none."""
    try:
        return json.loads(keys.unseal(lock, bytes.fromhex(locked or "")))
    except (Unsafe, ValueError, TypeError, RecursionError):
        return None


def _numbers(cohort: Cohort, holder: str, said: Mapping[str, str] | None) -> dict[str, int]:
    """The shares that a client gives of its group; nothing where it says something else."""
    try:
        said = said or {}
        return {name: int(said[name], 16) % keys.PRIME for name in cohort.group(holder) if name in said}
    except (ValueError, TypeError):
        return {}


def _recovered(cohort: Cohort, name: str, found: Shares) -> int:
    """A secret, of as many shares as it needs."""
    mine = found.get(name, {})
    if len(mine) < cohort.threshold:
        raise GivenUp(f"of {name}'s secret {len(mine)} shares came, and it takes {cohort.threshold}")
    return keys.combine({point: mine[point] for point in sorted(mine)[: cohort.threshold]})
