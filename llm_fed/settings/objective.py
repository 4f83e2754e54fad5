"""What the loss of a run is: the tokens of right answers, or which of two answers is preferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llm_fed.basics.errors import UserError
from llm_fed.settings import NonNegativeFloat, PositiveFloat

REFERRING = ("dpo", "ipo", "kto")  # compare the model with a reference
BETA = {"simpo": 2.0}  # the default of others is USUAL_BETA
USUAL_BETA = 0.1
PAPERS = {
    "dpo": "DPO (Rafailov et al. 2023)", "ipo": "IPO (Azar et al. 2024)", "kto": "KTO (Ethayarajh et al. 2024)",
    "orpo": "ORPO (Hong et al. 2024)", "simpo": "SimPO (Meng et al. 2024)",
}  # fmt: skip


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss that language models are trained with; see docs/preferences.md."""

    # `sft` learns the tokens of answers; `dpo`, `ipo`, `orpo` and `simpo` learn from pairs of a chosen and a rejected
    # answer, and `kto` from single answers that are desirable or not
    name: Literal["sft", "dpo", "ipo", "kto", "orpo", "simpo"] = "sft"
    # how strongly preferences count against staying near the reference (tau of ipo, lambda of orpo); null: 0.1, and 2
    # for simpo
    beta: PositiveFloat | None = None
    # with what dpo, ipo and kto compare the model: the frozen `base`, the `message` of this round, or the model with
    # which the client ended its `last` round
    reference: Literal["base", "message", "last"] = "base"
    gamma: NonNegativeFloat = 1.0  # by how much a chosen answer's reward is to be above the other's, for simpo

    @property
    def strength(self) -> float:
        """beta, or its default."""
        return BETA.get(self.name, USUAL_BETA) if self.beta is None else self.beta

    @property
    def preferences(self) -> bool:
        """Whether it learns from preferences."""
        return self.name != "sft"

    @property
    def refers(self) -> bool:
        """Whether it compares the model with a reference."""
        return self.name in REFERRING

    def describe(self) -> str:
        """Of one that learns from preferences, for plans and model cards."""
        of = {"base": "the frozen base", "message": "the model received", "last": "the client's last model"}
        against = f", against {of[self.reference]}" if self.refers else ""
        return f"{PAPERS[self.name]}, beta {self.strength:g}{against}"


def check_objective(objective: ObjectiveConfig, loss_on: str) -> None:
    """UserError for a setting that the loss does not have, and for losses on prompts, which both answers share.
    `loss_on`: `task.loss_on`."""
    usual = ObjectiveConfig(objective.name)
    only = {"beta": (objective.beta, None, tuple(PAPERS)),
            "reference": (objective.reference, usual.reference, REFERRING),
            "gamma": (objective.gamma, usual.gamma, ("simpo",))}  # fmt: skip
    for key, (value, default, names) in only.items():
        if objective.name not in names and value != default:
            raise UserError(
                f"objective.{key}={value} is for {', '.join(names)}, but objective.name is {objective.name}; leave it "
                "out, or choose one of these"
            )
    if objective.preferences and loss_on != "response":
        raise UserError(
            f"task.loss_on={loss_on} would count the prompts, which chosen and rejected answers share, in "
            f"objective.name={objective.name}; set task.loss_on=response"
        )
