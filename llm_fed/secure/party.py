"""Party: a client. It believes its owner's list of keys, and what those sign or seal; the server is another party.

What it answers may leave once `memory` is on the disk, so that it never answers twice: neither the same cohort, nor a
round of which its part was opened.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from llm_fed.secure import keys
from llm_fed.secure.cohort import LEAST, Cohort, CohortFields, Terms, digest_of, signs
from llm_fed.secure.keys import Unsafe

Certificate = tuple[str, str]  # a client's public key for what is sealed, and its node's signature, in hexadecimal
SECRETS = ("own", "pairs", "lock")  # of a client in a round: its own mask, the key of those with others, of its reveal


class OwnTerms(TypedDict):
    """See `Terms`."""

    present: list[str]
    message: str
    largest: int
    settings: str


class RoundMemory(TypedDict):
    """What a client remembers of a round that is not over; secrets and keys are in hexadecimal."""

    cohort: CohortFields
    secrets: dict[str, str]
    channels: dict[str, str]  # by neighbour its public key
    held: dict[str, list[str]]  # by client the shares of its secrets
    terms: NotRequired[OwnTerms]  # since it has answered


class PartyMemory(TypedDict):
    """What a client remembers of a run."""

    channel: str  # its private key for what is sealed
    number: int  # of the last cohort that it prepared
    opened: int  # the last round of which its part was opened
    round: RoundMemory | None


class Dealt(TypedDict):
    """What a client answers to `Party.prepare`."""

    public: str
    own: str
    sealed: dict[str, str]


class Revealed(TypedDict):
    """What a client answers to `Party.reveal`."""

    locks: dict[str, str]
    locked: str


def begin() -> PartyMemory:
    """The memory of a client that has not taken part in the run yet."""
    return {"channel": keys.fresh().to_bytes(32).hex(), "number": 0, "opened": 0, "round": None}


def certificate(memory: PartyMemory, run: str, name: str, identity: ec.EllipticCurvePrivateKey) -> Certificate:
    """What says that a key is this client's in this run, signed with the key of its node."""
    public = keys.public_of(bytes.fromhex(memory["channel"])).hex()
    return public, keys.sign(identity, _certified(run, name, public)).hex()


def _certified(run: str, name: str, public: str) -> bytes:
    return digest_of("channel", run, name, public)


@dataclass
class Party:
    """A client in a run. `identities`: by client the key under which its node is registered, as the owner of this one
    knows it. `memory`: of this client, as JSON; see `begin`."""

    name: str
    identities: Mapping[str, ec.EllipticCurvePublicKey]
    memory: PartyMemory

    def prepare(self, cohort: Cohort, certificates: Mapping[str, Certificate]) -> Dealt:
        """Draw secrets for a cohort, and deal them to the neighbours.

        Returns:
            The public key of pairwise masks, a digest of the secret of the own one, and what is sealed for each.
        """
        self._check(cohort)
        group = cohort.group(self.name)
        channels = {name: self._channel(cohort, name, certificates) for name in group if name != self.name}
        drawn = {kind: keys.fresh() for kind in SECRETS}
        dealt = [keys.split(drawn[kind], len(group), cohort.threshold) for kind in SECRETS]
        public, sealed, mine = keys.public_of(keys.private_of(drawn["pairs"])), {}, []
        for name in group:
            own = [values[cohort.point(name, self.name) - 1].to_bytes(32) for values in dealt]
            if name == self.name:
                mine = [share.hex() for share in own]
            else:
                key = self._sealing(cohort, self.name, name, channels[name])
                sealed[name] = keys.seal(key, b"".join([public, *own])).hex()
        self.memory["number"] = cohort.number
        self.memory["round"] = {
            "cohort": cohort.says(), "secrets": {kind: secret.to_bytes(32).hex() for kind, secret in drawn.items()},
            "channels": {name: key.hex() for name, key in channels.items()}, "held": {self.name: mine},
        }  # fmt: skip
        return {"public": public.hex(), "own": commitment(drawn["own"]), "sealed": sealed}

    def mask(self, vector: Tensor, terms: Terms, sealed: Mapping[str, str]) -> dict[str, str]:
        """Add the masks of these terms to (P,) int32, in place. `sealed`: what the neighbours among `terms.present`
        have dealt to this one.

        Returns:
            For each of these what proves to it that this client has answered on these terms.
        """
        round = self._round(terms.cohort, "mask")
        neighbours, secrets = terms.neighbours(self.name), round["secrets"]
        if self.name not in terms.present or 1 + len(neighbours) < terms.cohort.threshold:
            raise Unsafe("cohort", f"{len(neighbours)} neighbours have prepared, the server says, and with this client "
                         f"{terms.cohort.threshold} must")  # fmt: skip
        if missing := [name for name in neighbours if name not in sealed]:
            raise Unsafe("sealed", f"the server says that {missing[0]} has prepared, and brings nothing of it")
        private, proofs = keys.private_of(int(secrets["pairs"], 16)), {}
        masks = [(own_mask(int(secrets["own"], 16)), 1)]
        for name in neighbours:
            channel = bytes.fromhex(round["channels"][name])
            key = self._sealing(terms.cohort, name, self.name, channel)
            opened = keys.unseal(key, bytes.fromhex(sealed[name]))
            public, round["held"][name] = opened[:32], [opened[at : at + 32].hex() for at in (32, 64, 96)]
            masks.append((keys.agreed(private, public, terms.digest), signs(self.name, name)))
            proofs[name] = self._proof(terms, self.name, channel)
        keys.add_streams(vector, masks)
        round["terms"] = {
            "present": list(terms.present), "message": terms.message, "largest": terms.largest,
            "settings": terms.settings,
        }  # fmt: skip
        return proofs

    def reveal(self, cohort: Cohort, alive: Sequence[str], proofs: Mapping[str, str]) -> Revealed:
        """What takes the masks off the sum of those that have answered.

        Args:
            alive: of the group, who has answered, as the server says.
            proofs: by which each of them proves it, see `mask`.

        Returns:
            In the open the shares of locks, and the rest locked.
        """
        round = self._round(cohort, "reveal")
        own = round["terms"]
        terms = Terms(cohort, tuple(own["present"]), own["message"], own["largest"], own["settings"])
        there = {self.name, *terms.neighbours(self.name)}
        if self.name not in alive or not there.issuperset(alive) or len(set(alive)) < cohort.threshold:
            said = f"{len(set(alive) & there)} of {len(there)} clients have answered"
            raise Unsafe("vanished", f"{said}, the server says; {cohort.threshold} must, this one among them")
        for name in set(alive) - {self.name}:
            proof = self._proof(terms, name, bytes.fromhex(round["channels"][name]))
            if not hmac.compare_digest(proofs.get(name, ""), proof):
                raise Unsafe("proof", f"the server says that {name} has answered, on these terms, and cannot prove it")
        held = {name: dict(zip(SECRETS, round["held"][name], strict=True)) for name in there}
        told = {name: held[name]["own"] if name in alive else held[name]["pairs"] for name in there}
        lock = unlocking(int(round["secrets"]["lock"], 16))
        self.memory["round"], self.memory["opened"] = None, cohort.round
        return {
            "locks": {name: held[name]["lock"] for name in alive},
            "locked": keys.seal(lock, json.dumps(told).encode()).hex(),
        }

    def _check(self, cohort: Cohort) -> None:
        if cohort.number <= self.memory["number"]:
            raise Unsafe("again", f"the server asks again for cohort {cohort.number}, which has been prepared")
        if cohort.round <= self.memory["opened"]:
            why = f"its part in round {self.memory['opened']} has been opened, and the server asks for {cohort.round}"
            raise Unsafe("again", f"{why}: the difference of two sums may be one client")
        if strangers := [name for name in cohort.names if name not in self.identities]:
            raise Unsafe("strangers", f"the server names {strangers[0]}, whom the owner's list of keys does not have")
        if self.name not in cohort.names or len(cohort.names) < LEAST:
            raise Unsafe("cohort", f"it is of {len(cohort.names)} clients, and must be of {LEAST}, this one among them")

    def _channel(self, cohort: Cohort, name: str, certificates: Mapping[str, Certificate]) -> bytes:
        """A neighbour's public key for what is sealed. Unsafe: its node has not signed it."""
        if name not in certificates:
            raise Unsafe("keys", f"the server brings no key of {name}")
        public, signature = certificates[name]
        certified = _certified(cohort.run, name, public)
        if not keys.is_signed(self.identities[name], certified, bytes.fromhex(signature)):
            raise Unsafe("keys", f"the key that the server gives as that of {name} is not signed by {name}'s node")
        return bytes.fromhex(public)

    def _round(self, cohort: Cohort, phase: str) -> RoundMemory:
        """What is remembered of a round that stands before this phase."""
        round = self.memory["round"]
        if round is None or round["cohort"] != cohort.says():
            raise Unsafe("again", f"cohort {cohort.number} is not the last one that was prepared, or is over")
        if ("terms" in round) != (phase == "reveal"):
            done = "has answered" if "terms" in round else "has not answered"
            raise Unsafe("again", f"the server asks to {phase}, and this client {done} in cohort {cohort.number}")
        return round

    def _sealing(self, cohort: Cohort, sender: str, receiver: str, channel: bytes) -> bytes:
        purpose = digest_of("sealed", cohort.digest.hex(), sender, receiver)
        return keys.agreed(bytes.fromhex(self.memory["channel"]), channel, purpose)

    def _proof(self, terms: Terms, of: str, channel: bytes) -> str:
        """That `of`, who is this client or a neighbour, has answered on these terms: nobody else can make it."""
        purpose = digest_of("answered", terms.digest.hex(), of)
        return keys.agreed(bytes.fromhex(self.memory["channel"]), channel, purpose).hex()


def own_mask(secret: int) -> bytes:
    return keys.derived(secret.to_bytes(32), b"own mask")


def unlocking(secret: int) -> bytes:
    return keys.derived(secret.to_bytes(32), b"lock")


def commitment(secret: int) -> str:
    """By which the server knows that it has put a secret together."""
    return hashlib.sha256(b"commitment" + secret.to_bytes(32)).hexdigest()
