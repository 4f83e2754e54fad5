"""A cohort and its server in one process: every message is JSON on its way, and is kept."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import ec

from llm_fed.secure import party
from llm_fed.secure.cohort import Cohort, Terms
from llm_fed.secure.opening import open_sum
from llm_fed.secure.party import Party

_KEYS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(4)]  # whose keys they are is no matter here


def names_of(number: int) -> tuple[str, ...]:
    return tuple(f"c{place:03}" for place in range(number))


class Parties:
    """Attributes: traffic: all that crossed, as it crossed."""

    def __init__(self, names: Sequence[str], run: str = "run"):
        self.run, self.number, self.traffic = run, 0, []
        own = {name: _KEYS[place % len(_KEYS)] for place, name in enumerate(names)}
        public = {name: key.public_key() for name, key in own.items()}
        self.parties = {name: Party(name, public, party.begin()) for name in names}
        self.certificates = {
            name: party.certificate(each.memory, run, name, own[name]) for name, each in self.parties.items()
        }

    def crossed(self, message: Any) -> Any:
        self.traffic.append(json.dumps(message))
        return json.loads(self.traffic[-1])

    def cohort(self, names: Sequence[str], round: int = 1) -> Cohort:
        self.number += 1
        return Cohort.of(self.crossed(Cohort(self.run, self.number, round, tuple(names)).says()))

    def prepare(self, cohort: Cohort, who: Collection[str]) -> dict[str, Any]:
        return {
            name: self.crossed(self.parties[name].prepare(cohort, self.crossed(self.certificates)))
            for name in cohort.names
            if name in who
        }

    def dealt(self, prepared: Mapping[str, Any], name: str) -> dict[str, str]:
        return {other: said["sealed"][name] for other, said in prepared.items() if name in said["sealed"]}

    def mask(
        self, terms: Terms, prepared: Mapping[str, Any], vectors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        masked, proofs = {}, {}
        for name, vector in vectors.items():
            masked[name] = vector.clone()
            sealed = self.crossed(self.dealt(prepared, name))
            proofs[name] = self.crossed(self.parties[name].mask(masked[name], terms, sealed))
            self.traffic.append(masked[name].numpy().tobytes())
        return masked, proofs

    def reveal(
        self, cohort: Cohort, alive: Collection[str], proofs: Mapping[str, Any], who: Collection[str]
    ) -> dict[str, Any]:
        told = {}
        for name in who:
            there = [other for other in cohort.group(name) if other in alive]
            own = self.crossed({other: proofs[other][name] for other in there if other != name})
            told[name] = self.crossed(self.parties[name].reveal(cohort, there, own))
        return told

    def round(self, vectors: Mapping[str, torch.Tensor], vanish: Sequence[Collection[str]] = ((), (), ())) -> Any:
        """The sum over those who answered, and who these are; `vanish` says who does not answer in each phase."""
        cohort = self.cohort([*vectors])
        prepared = self.prepare(cohort, vectors.keys() - set(vanish[0]))
        terms = Terms(cohort, tuple(prepared), "message", 1)
        alive = [name for name in prepared if name not in vanish[1]]
        masked, proofs = self.mask(terms, prepared, {name: vectors[name] for name in alive})
        total = torch.zeros_like(next(iter(vectors.values())))
        for vector in masked.values():
            total += vector
        told = self.reveal(cohort, alive, proofs, [name for name in alive if name not in vanish[2]])
        open_sum(terms, prepared, alive, total, told)
        return total, alive
