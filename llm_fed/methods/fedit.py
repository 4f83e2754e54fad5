"""FedIT (Zhang et al., ICASSP 2024) is FedAvg (McMahan et al., AISTATS 2017) on LoRA adapters; FedLoRA fine-tunes its
result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llm_fed.errors import UserError
from llm_fed.merge import mean
from llm_fed.messages.wire import Message
from llm_fed.method import Method, Upload, by_arrival
from llm_fed.settings import PositiveFloat, PositiveInt
from llm_fed.site import Site


@dataclass(frozen=True)
class FedIT(Method):
    """One adapter for all: every client trains it, the server takes the mean weighted by numbers of examples.

    The server adds the weighted mean of the updates, which is the weighted mean of the trained adapters: all start
    equal. Where answers are late, `wait` says for which of them a step waits; without delays every variant is the same
    (`first_n` with the default `wait_for`).
    """

    paper: ClassVar[str] = "FedIT (Zhang et al. 2024), FedAvg (McMahan et al. 2017)"
    server_trains: ClassVar[bool] = False  # the server trains the model, too, for which it needs all of it

    # none: a step on whatever arrives in a round; deadline: on what arrives in the round that asked for it;
    # first_n: on the first answers to the current model, one per client, however many rounds they take; the others are
    # dropped
    wait: Literal["none", "deadline", "first_n"] = "none"
    wait_for: PositiveInt | None = None  # first_n: so many answers; null: as many as clients are asked in a round
    private_head: bool = False  # of image models' adapters: each client trains and keeps a head of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private_head and self.server_trains:
            raise UserError("method.private_head is for fedit: here the server trains the head, too; leave it out")

    @property
    def mean_only(self) -> bool:  # type: ignore[override]
        return self.wait != "first_n"  # which counts answers by client

    @property
    def one_model(self) -> bool:  # type: ignore[override]
        return not self.private_head

    @property
    def adapters_only(self) -> bool:  # type: ignore[override]
        return self.private_head  # beside whole models nothing would be shared

    @property
    def shared(self) -> str:  # type: ignore[override]
        return r"\.lora_[AB]$" if self.private_head else r".*"

    def init(self, server: Site) -> Message:
        model = super().init(server)
        return {"model": model, "since": 1, "deltas": {}, "sizes": {}} if self.wait == "first_n" else model

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"] if self.wait == "first_n" else state

    async def server_update(self, server: Site, state: Message, uploads: list[Upload]) -> Message:
        if self.wait == "deadline":
            uploads = [upload for upload in uploads if upload.staleness == 0]
        if self.wait != "first_n":
            return await super().server_update(server, state, uploads)
        # The current model was first sent in round `since`: who was asked before answers an older one.
        wait_for = self._enough(server)
        deltas, sizes = dict(state["deltas"]), dict(state["sizes"])
        for upload in by_arrival(server, uploads):
            current = server.round - upload.staleness >= state["since"]
            if current and upload.client not in deltas and len(deltas) < wait_for:
                deltas[upload.client], sizes[upload.client] = upload.content, upload.num_examples
        if len(deltas) < wait_for:
            return {**state, "deltas": deltas, "sizes": sizes}
        model = state["model"] + mean(list(deltas.values()), list(sizes.values()))
        return {"model": model, "since": server.round + 1, "deltas": {}, "sizes": {}}

    def _enough(self, server: Site) -> int:
        """For how many answers `first_n` waits."""
        return server.cohort if self.wait_for is None else self.wait_for


@dataclass(frozen=True)
class FedLoRA(Method):
    """FedIT, and after the last round each client fine-tunes the result on its own data (FedAvg+ in the FedMerge
    paper)."""

    paper: ClassVar[str] = "FedLoRA (Yi et al. 2023), FedAvg+ (Chen et al. 2026)"
    mean_only: ClassVar[bool] = True

    personal_steps: PositiveInt = 20  # optimizer steps of the fine-tuning after the last round
    personal_lr: PositiveFloat | None = None  # its learning rate; null: `local.lr`

    async def finish(self, client: Site, message: Message) -> None:
        lr = client.local.lr if self.personal_lr is None else self.personal_lr
        client.memory["personal"] = await client.fit(message, steps=self.personal_steps, lr=lr)

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory.get("personal", message)
