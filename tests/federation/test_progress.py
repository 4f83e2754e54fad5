"""What a checkpoint gives back of the clients' memories."""

from types import SimpleNamespace
from typing import Any

from llm_fed.federation.progress import restore


def test_who_remembers_something_is_looked_at_again_after_a_restart():
    """Of the others nothing is looked at until they are asked; `save` would forget a client that is missing here."""
    state = {"state": None, "in_flight": [], "best_round": 0, "best_score": 0.0, "best_loss": 1.0}
    saved: Any = SimpleNamespace(rows={"memory/ada": {"own": 1}}, state=state, round=3)
    saved.memory = lambda owner: saved.rows.get(owner, {})
    clients: Any = {name: SimpleNamespace(memory={}) for name in ("ada", "bob")}
    progress = restore(saved, clients)
    assert progress.requested == {"ada"} and progress.round == 3
    assert clients["ada"].memory == {"own": 1} and clients["bob"].memory == {}
