"""Which runs a rule of `server.aggregation` is for; the rules themselves are in `merge/robust.py`."""

from __future__ import annotations

from llm_fed.basics.errors import UserError
from llm_fed.federation import privacy, summing
from llm_fed.merge.robust import lacking
from llm_fed.method import Method
from llm_fed.settings.config import Config

_ALONE = ("local", "center")


def averages(method: Method) -> bool:
    """Whether a method takes its means by `server.aggregation`: in a step of its own, or in that of `Method`."""
    return method.robust or type(method).server_update is Method.server_update


def check(config: Config, method: Method) -> None:
    """Refuse a run whose server would take no mean by the rule that it names, or could not keep the privacy that it
    asks for. UserError: what does not go together."""
    if config.privacy.clip is not None:
        privacy.check(config, method)
    if config.privacy.secure:
        summing.check(config, method)
    rule, name = config.server.aggregation, config.method["name"]
    if rule == "mean":
        return
    if not averages(method):
        raise UserError(
            f"server.aggregation={rule} needs a method whose server averages the clients' updates, and {name} does "
            "not; set server.aggregation=mean"
        )
    if config.privacy.central:
        raise UserError(
            f"server.aggregation={rule} needs every single upload, but with privacy.where=server only their noisy mean "
            "is used; set server.aggregation=mean or privacy.where=client"
        )


def trust(config: Config, method: Method) -> str:
    """What clients that lie could do to the others, as a sentence; empty where nobody is sent what others learned."""
    rule, name = config.server.aggregation, config.method["name"]
    if method.parents or name in _ALONE:
        return ""
    if rule != "mean":
        return f"Up to the share {config.server.liars:g} of a round's clients may lie (server.aggregation={rule})."
    one = "One client that sends false updates can undo what the others teach"
    if config.privacy.central:
        return f"{one}, though none moves the mean by more than privacy.clip at a time."
    if config.privacy.secure:
        return f"{one}, and with privacy.secure nobody sees which client it was."
    if not averages(method):
        return f"{one}, and {name} has no rule of server.aggregation against it."
    return f"{one}, as server.aggregation=mean believes every one; multi-krum and others do not."


def check_cohort(config: Config, cohort: int) -> None:
    """Refuse a rule, or a sum, for which even the largest cohort is too small. UserError: how many it needs."""
    if config.privacy.secure:
        summing.check_cohort(cohort)
    if config.server.aggregation != "mean" and (why := lacking(cohort, config.server)):
        raise UserError(f"{why}, at most, in a round; have more clients, lower server.liars, or choose another rule")
