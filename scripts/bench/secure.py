"""What `privacy.secure` costs: a client's seconds in the three phases, its bytes, and the server's seconds for a sum.

    python scripts/bench/secure.py [--clients 10,100,1000] [--numbers 5000000]

One client is measured with all its numbers, and the server with as many, after 3 % have vanished with their masked
numbers missing; the others of the cohort have few numbers, and do not check signatures again. Seconds are those of one
core (`time.process_time`). Bytes are those of JSON and numbers; plain is what the client would send and be sent without
masks, float32 both ways.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import ec

from llm_fed.secure import keys, party
from llm_fed.secure.cohort import Cohort, Terms
from llm_fed.secure.opening import open_sum
from llm_fed.secure.party import Party

FEW = 8  # numbers of the clients that are not measured


def timed(work: Any, *given: Any) -> tuple[float, Any]:
    begun = time.process_time()
    found = work(*given)
    return time.process_time() - begun, found


def measure(number: int, size: int) -> str:
    """A line of the table."""
    names = tuple(f"client{place:04}" for place in range(number))
    identity = ec.generate_private_key(ec.SECP384R1())
    parties = {name: Party(name, dict.fromkeys(names, identity.public_key()), party.begin()) for name in names}
    certificates = {name: party.certificate(own.memory, "run", name, identity) for name, own in parties.items()}
    cohort, one = Cohort("run", 1, 1, names), names[0]
    brought = {name: certificates[name] for name in cohort.group(one)}
    prepare, said = timed(parties[one].prepare, cohort, brought)
    checked, keys.is_signed = keys.is_signed, lambda *given: True
    prepared = {one: said} | {name: parties[name].prepare(cohort, certificates) for name in names[1:]}
    keys.is_signed = checked
    terms, gone = Terms(cohort, names, "0" * 64, 1), names[number - max(1, number * 3 // 100) :]
    alive = [name for name in names if name not in gone]
    vectors = {name: torch.zeros(size if name == one else FEW, dtype=torch.int32) for name in alive}
    sealed = {name: {other: prepared[other]["sealed"][name] for other in terms.neighbours(name)} for name in alive}
    mask, proofs_of_one = timed(parties[one].mask, vectors[one], terms, sealed[one])
    proofs = {one: proofs_of_one} | {name: parties[name].mask(vectors[name], terms, sealed[name]) for name in alive[1:]}
    there = {name: [other for other in cohort.group(name) if other in vectors] for name in alive}
    given = {name: {other: proofs[other][name] for other in there[name] if other != name} for name in alive}
    reveal, _ = timed(parties[one].reveal, cohort, there[one], given[one])
    told = {one: _} | {name: parties[name].reveal(cohort, there[name], given[name]) for name in alive[1:]}
    total = torch.zeros(FEW, dtype=torch.int32)
    for vector in vectors.values():
        total += vector[:FEW]
    open_sum(terms, prepared, alive, total, told)
    assert not total.any()  # all vectors were 0
    opened, _ = timed(open_sum, terms, prepared, alive, torch.zeros(size, dtype=torch.int32), told)
    orders = [cohort.says()] * 3 + [brought, terms.present, sealed[one], there[one], given[one]]
    words = len(json.dumps([orders, prepared[one], proofs_of_one, told[one]]))
    bytes_ratio = (2 * 4 * size + words) / (2 * 4 * size)
    seconds = f"{prepare:.2f} | {mask:.2f} | {reveal:.2f}"
    return f"| {number:,} | {len(gone)} | {seconds} | {words / 1e3:,.0f} | {bytes_ratio:.3f} | {opened:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="10,100,1000")
    parser.add_argument("--numbers", type=int, default=5_000_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| clients | vanished | prepare (s) | mask (s) | reveal (s) | kB of words | bytes / plain | open (s) |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for number in given.clients.split(","):
        print(measure(int(number), given.numbers), flush=True)


if __name__ == "__main__":
    main()
