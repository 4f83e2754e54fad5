"""Rounds of the federation in closed form (toy.py)."""

import toy

from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, Scoring, federate
from llm_fed.methods.fedit import FedIT
from llm_fed.runs.folder import Run

TARGETS = {"c0": 1.0, "c1": 2.0, "c2": 4.0}


def go(
    folder,
    method=None,
    *,
    rounds=4,
    runtime=None,
    schedule=None,
    evaluate=None,
    config=None,
    fresh=False,
    stop_after=None,
    number=3,
):
    """One federation over `number` clients of 1, 2, 3, ... examples; `stop_after` dies after that many rounds."""
    clients, server, method = toy.clients(number), toy.server(), method or FedIT()
    config = config or toy.config(rounds=rounds)
    server.clients, server.cohort, server.step = tuple(clients), number, config.server
    runtime = runtime or toy.ToyRuntime({**{name: float(k) for k, name in enumerate(clients)}, **TARGETS})
    resumed = []
    lines = []

    def listen(record):
        lines.append(record)
        if stop_after and record["round"] > stop_after:
            raise KeyboardInterrupt

    with Run(folder, config, fresh, listen) as run:
        run.begin()
        federation = Federation(
            method, LocalClients(clients, schedule or toy.everyone(clients), runtime), server, runtime
        )
        scoring = Scoring(clients, evaluate) if evaluate else None
        progress = federate(federation, run, scoring, on_resume=resumed.append)
    return progress, clients, runtime, resumed, lines
