"""Losses on preferences, as functions of log-likelihoods: one for each paper.

DPO     Rafailov et al. 2023, Eq. 7; with label smoothing the conservative one of Mitchell 2023
IPO     Azar et al. 2024, Eq. 17
KTO     Ethayarajh et al. 2024, Eq. 8
ORPO    Hong et al. 2024, Eq. 6 and 7
SimPO   Meng et al. 2024, Eq. 6

Deviation: IPO divides each log-ratio by the answer's number of tokens, as TRL does, whose authors asked those of IPO.
Deviation: ORPO's likelihood term is the mean over the chosen answer's tokens; TRL's is over the prompt's, too.
`tests/engine/test_preferences_against_trl.py` compares DPO and IPO with TRL.

Shape letters: N examples, S answers of each: the chosen and the rejected one, or one that is desirable or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from llm_fed.settings.objective import ObjectiveConfig


@dataclass(frozen=True)
class Likelihoods:
    """What a model makes of N examples with S answers each, and what a reference makes of them."""

    logps: Tensor  # (N, S) of all tokens of an answer together
    counts: Tensor  # (N, S) its number of tokens
    reference: Tensor  # (N, S) the same of the reference; zero where there is none
    desirable: Tensor  # (N,) bool, of single answers; True of pairs

    @property
    def ratios(self) -> Tensor:
        """(N, S): log pi - log pi_ref."""
        return self.logps - self.reference


def preference_losses(objective: ObjectiveConfig, of: Likelihoods, drift: Tensor | None = None) -> Tensor:
    """(N,): the loss of each example. `drift`: z (N,) of KTO, the estimated divergence, without gradient."""
    beta = objective.strength
    if objective.name == "kto":
        rewards = beta * (of.ratios[:, 0] - (0.0 if drift is None else drift))
        sign = torch.where(of.desirable, 1.0, -1.0).to(rewards)
        return 1 - torch.sigmoid(sign * rewards)
    if objective.name == "orpo":
        means = of.logps / of.counts
        odds = means - torch.log1p(-means.exp().clamp(max=1 - torch.finfo(means.dtype).eps))
        return -means[:, 0] - beta * logsigmoid(_margin(odds))
    if objective.name == "simpo":
        return -logsigmoid(beta * _margin(of.logps / of.counts) - objective.gamma)
    if objective.name == "ipo":
        return (_margin(of.ratios / of.counts) - 1 / (2 * beta)) ** 2
    return -logsigmoid(beta * _margin(of.ratios))


def rewards(objective: ObjectiveConfig, of: Likelihoods) -> Tensor:
    """(N, S): the implicit reward of each answer, beta log(pi / pi_ref); of ORPO and SimPO, which have no reference,
    beta times the mean log-likelihood of its tokens."""
    if objective.name in ("orpo", "simpo"):
        return objective.strength * of.logps / of.counts
    return objective.strength * of.ratios


def _margin(values: Tensor) -> Tensor:
    """(N,) of (N, 2): of the chosen answer less that of the rejected one."""
    return values[:, 0] - values[:, 1]
