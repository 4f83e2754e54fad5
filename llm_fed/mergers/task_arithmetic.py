"""Editing Models with Task Arithmetic (Ilharco, Ribeiro, Wortsman, Gururangan, Schmidt, Hajishirzi, Farhadi; ICLR
2023), for a federated and a local adapter."""

from __future__ import annotations

from llm_fed.merge.products import combined
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.settings import PositiveFloat
from llm_fed.state import State


@Merger(paper="Task arithmetic (Ilharco et al. 2023)", data_free=True, doubles=True)
def task_arithmetic(
    client: Client,
    fed: State,
    local: State,
    *,
    scaling: PositiveFloat = 0.5,  # lambda; 0.5 is the mean of the two. The paper chooses it on validation examples
) -> Merged:
    """The sum of the two adapters' layer updates s B A, times `scaling`; exactly, as one adapter of twice the rank."""
    return combined([fed, local], lambda products: (scaling, scaling)), {"scaling": scaling}
