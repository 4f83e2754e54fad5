"""A server that does not keep to the protocol: each attack ends in an error at the client (docs/privacy.md)."""

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from parties import Parties, names_of

from llm_fed.secure import keys, opening, party
from llm_fed.secure.cohort import Cohort, Terms
from llm_fed.secure.keys import Unsafe

NAMES = names_of(7)  # five of them open a secret


class Attacked:
    """A cohort after its first phase, and what its server has seen."""

    def __init__(self) -> None:
        self.all = Parties(NAMES)
        self.first = self.all.prepare(self.all.cohort(NAMES), NAMES)
        self.cohort = self.all.cohort(NAMES)
        self.prepared = self.all.prepare(self.cohort, NAMES)
        self.terms = Terms(self.cohort, NAMES, "message", 10)
        self.proofs: dict[str, Any] = {}

    def mask(self, who, terms=None, prepared=None) -> None:
        vectors = {name: torch.zeros(3, dtype=torch.int32) for name in who}
        self.proofs |= self.all.mask(terms or self.terms, prepared or self.prepared, vectors)[1]

    def reveal(self, alive, who=NAMES[:1]) -> dict[str, Any]:
        if not self.proofs:
            self.mask(NAMES)
        return self.all.reveal(self.cohort, alive, self.proofs, who)


def certificate_of(name: str, all: Parties) -> Any:
    """One that the server has signed with a key of its own."""
    return party.certificate(party.begin(), all.run, name, ec.generate_private_key(ec.SECP256R1()))


def asks_twice_to_prepare(attack):
    attack.all.prepare(attack.cohort, NAMES)


def asks_twice_for_the_vector(attack):
    """Two masked vectors under the same masks would differ by the difference of two updates."""
    attack.mask(NAMES)
    attack.mask(NAMES[:1])


def asks_twice_to_reveal(attack):
    attack.reveal(NAMES)
    attack.reveal(NAMES[:6])


def goes_back_to_a_round_that_was_opened(attack):
    attack.reveal(NAMES)
    attack.all.prepare(attack.all.cohort(NAMES, round=1), NAMES)


def replays_what_was_sealed_for_another_cohort(attack):
    attack.mask(NAMES[:1], prepared=attack.first)


def swaps_what_was_sealed(attack):
    prepared = deepcopy(attack.prepared)
    prepared["c001"]["sealed"]["c000"] = attack.prepared["c002"]["sealed"]["c000"]
    attack.mask(NAMES[:1], prepared=prepared)


def keeps_back_what_was_sealed(attack):
    prepared = {name: said for name, said in attack.prepared.items() if name != "c001"}
    attack.mask(NAMES[:1], prepared=prepared)


def swaps_keys(attack):
    attack.all.certificates["c003"] = certificate_of("c003", attack.all)
    attack.all.prepare(attack.all.cohort(NAMES), NAMES)


def gives_one_client_the_key_of_another(attack):
    attack.all.certificates["c003"] = attack.all.certificates["c004"]
    attack.all.prepare(attack.all.cohort(NAMES), NAMES)


def names_sybils(attack):
    attack.all.certificates["eve"] = certificate_of("eve", attack.all)
    attack.all.prepare(attack.all.cohort([*NAMES, "eve"]), NAMES)


def makes_a_cohort_of_two(attack):
    attack.all.prepare(attack.all.cohort(NAMES[:2]), NAMES)


def says_that_few_have_prepared(attack):
    attack.mask(NAMES[:1], terms=Terms(attack.cohort, NAMES[:4], "message", 10))


def drops_all_but_one(attack):
    attack.reveal(NAMES[:1])


def drops_too_many(attack):
    attack.reveal(NAMES[:4])


def says_that_one_has_answered_who_has_not(attack):
    attack.mask(NAMES[:6])
    attack.proofs["c006"] = dict.fromkeys(NAMES, attack.proofs["c001"]["c000"])
    attack.reveal(NAMES)


def says_that_the_client_itself_has_vanished(attack):
    attack.reveal(NAMES[1:])


def sends_clients_different_models(attack):
    attack.mask(NAMES[:1])
    attack.mask(NAMES[1:], terms=Terms(attack.cohort, NAMES, "another", 10))
    attack.reveal(NAMES)


def weighs_clients_differently(attack):
    """One with weight 1 beside others of next to none would be nearly alone in the sum."""
    attack.mask(NAMES[:1])
    attack.mask(NAMES[1:], terms=Terms(attack.cohort, NAMES, "message", 10**6))
    attack.reveal(NAMES)


def trains_clients_differently(attack):
    """One that learns beside others that do not, or whose numbers are too coarse, would be alone in the sum."""
    attack.mask(NAMES[:1])
    attack.mask(NAMES[1:], terms=Terms(attack.cohort, NAMES, "message", 10, "a learning rate of 0"))
    attack.reveal(NAMES)


ATTACKS = {
    asks_twice_to_prepare: "again", asks_twice_for_the_vector: "again", asks_twice_to_reveal: "again",
    goes_back_to_a_round_that_was_opened: "again", replays_what_was_sealed_for_another_cohort: "sealed",
    swaps_what_was_sealed: "sealed", keeps_back_what_was_sealed: "sealed", swaps_keys: "keys",
    gives_one_client_the_key_of_another: "keys", names_sybils: "strangers", makes_a_cohort_of_two: "cohort",
    says_that_few_have_prepared: "cohort", drops_all_but_one: "vanished", drops_too_many: "vanished",
    says_that_one_has_answered_who_has_not: "proof", says_that_the_client_itself_has_vanished: "vanished",
    sends_clients_different_models: "proof", weighs_clients_differently: "proof",
    trains_clients_differently: "proof",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_of_the_server_ends_in_an_error_at_the_client(attack):
    with pytest.raises(Unsafe) as refused:
        attack(Attacked())
    assert refused.value.code == ATTACKS[attack]


def test_who_is_said_to_have_vanished_reveals_nothing_that_can_be_opened():
    """The server tells bob that all have answered, and the others that bob has vanished: it then knows bob's pairwise
    masks, and must not learn what bob reveals, as if he had not vanished."""
    attack = Attacked()
    bob, others = NAMES[1], [name for name in NAMES if name != NAMES[1]]
    told = attack.reveal(NAMES, [bob]) | attack.reveal(others, others)
    own, pairs = opening._unlocked(attack.cohort, others, told)
    assert len(pairs[bob]) == len(others) and all(len(own[name]) == len(others) for name in others)
    assert all(attack.cohort.point(bob, name) not in own[name] for name in NAMES)
    told = attack.reveal(NAMES, [bob]) if attack.all.parties[bob].memory["round"] else told
    both = Attacked()
    whole = both.reveal(NAMES, NAMES)
    own, _ = opening._unlocked(both.cohort, NAMES, whole)
    assert all(both.cohort.point(bob, name) in own[name] for name in NAMES)


def test_a_key_that_is_none_is_refused():
    for public in (bytes(32), b"\1" + bytes(31), bytes(5)):
        with pytest.raises(Unsafe, match="a public key is none"):
            keys.agreed(keys.private_of(keys.fresh()), public, b"")


def test_no_secret_stands_in_what_crosses():
    """Neither vectors, nor what was drawn, nor the key of what is sealed; only locked or sealed, or as single shares of
    what may be opened."""
    all, names = Parties(NAMES), NAMES
    vectors = {name: torch.arange(1000, dtype=torch.int32) * (place + 1) for place, name in enumerate(names)}
    cohort = all.cohort(names)
    prepared = all.prepare(cohort, names)
    terms = Terms(cohort, names, "message", 1)
    secrets = [
        secret for name in names for secret in [*all.parties[name].memory["round"]["secrets"].values(),
        *all.parties[name].memory["round"]["held"][name][:2], all.parties[name].memory["channel"]]
    ]  # fmt: skip
    _, proofs = all.mask(terms, prepared, vectors)
    all.reveal(cohort, names, proofs, names)
    traffic = [each if isinstance(each, bytes) else each.encode() for each in all.traffic]
    assert any(prepared["c000"]["public"].encode() in each for each in traffic)  # the search finds what is there
    for each in traffic:
        assert not any(secret.encode() in each or bytes.fromhex(secret) in each for secret in secrets)
        assert not any(vector.numpy().tobytes()[400:440] in each for vector in vectors.values())


@pytest.mark.parametrize("says", [None, {}, {"run": "r", "number": 1, "round": 1, "names": ["a", "a"]},
                                  {"run": "r", "number": "1", "round": 1, "names": ["a"]},
                                  {"run": "r", "number": 1, "round": 1, "names": [1]}])  # fmt: skip
def test_what_is_no_cohort_is_refused(says):
    with pytest.raises(ValueError, match="it is no cohort"):
        Cohort.of(says)


@pytest.mark.parametrize("lie", [{}, {"locks": 3}, {"locks": {"c000": "x"}, "locked": "zz"}, {"locked": 3},
                                 {"locks": {name: "1" for name in NAMES}, "locked": "00"}])  # fmt: skip
def test_a_client_that_lies_in_the_last_phase_ends_no_server(lie):
    """What it gives is no share, or a wrong one: the sum is opened without it, or not at all."""
    attack = Attacked()
    told = attack.reveal(NAMES, NAMES) | {"c006": json.loads(json.dumps(lie))}
    total = torch.zeros(3, dtype=torch.int32)
    try:
        opening.open_sum(attack.terms, attack.prepared, NAMES, total, told)
    except opening.GivenUp:
        return


def test_what_a_client_locks_may_be_anything():
    """Nested deeper than can be read; the six others are enough."""
    attack = Attacked()
    lock = party.unlocking(int(attack.all.parties["c006"].memory["round"]["secrets"]["lock"], 16))
    told = attack.reveal(NAMES, NAMES)
    told["c006"]["locked"] = keys.seal(lock, b"[" * 10**5).hex()
    opening.open_sum(attack.terms, attack.prepared, NAMES, torch.zeros(3, dtype=torch.int32), told)
