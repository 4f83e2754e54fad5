"""Adaptive Federated Optimization (Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan; ICLR 2021),
Algorithm 2, and FedAvgM (Hsu, Qi, Brown 2019), with which it compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from llm_fed.method import Message, Method, Server, State, Upload, mean_update
from llm_fed.settings import AtLeast, Below, PositiveFloat

Decay = Annotated[float, AtLeast(0), Below(1)]
Second = Callable[[Tensor, Tensor], Tensor]  # (v, Delta^2) -> the next v


@dataclass(frozen=True)
class FedAvgM(Method):
    """FedAvg with momentum at the server: v <- beta v + Delta, then the model moves by eta v. Delta is the mean of the
    clients' updates, weighed by numbers of examples."""

    paper: ClassVar[str] = "FedAvgM (Hsu et al. 2019)"
    one_model: ClassVar[bool] = True
    mean_only: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    server_lr: PositiveFloat = 1.0  # eta
    beta: Decay = 0.9

    def init(self, server: Server) -> Message:
        model = server.initial()
        return {"model": model, "momentum": 0 * model.row}

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"]

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads or not server.enough(len(uploads)):
            return state
        delta = mean_update(server, uploads)
        momentum = self.beta * state["momentum"] + delta.row
        return {"model": moved(state["model"], delta, self.server_lr * momentum), "momentum": momentum}


@dataclass(frozen=True)
class FedAdagrad(Method):
    """FedAvg with Adagrad at the server: v <- v + Delta^2, and the model moves by eta m / (sqrt(v) + tau)."""

    paper: ClassVar[str] = "FedAdagrad (Reddi et al. 2021)"
    one_model: ClassVar[bool] = True
    mean_only: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    server_lr: PositiveFloat = 0.01  # eta, of which the paper searches a grid
    beta1: Decay = 0.0  # m <- beta1 m + (1 - beta1) Delta
    tau: PositiveFloat = 1e-3  # how far the step adapts: v begins at tau^2

    def init(self, server: Server) -> Message:
        return begun(server, self.tau)

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"]

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        return adapted(server, state, uploads, self, lambda v, square: v + square)


@dataclass(frozen=True)
class FedAdam(Method):
    """FedAvg with Adam at the server: v <- beta2 v + (1 - beta2) Delta^2, and the model moves by eta m / (sqrt(v) +
    tau)."""

    paper: ClassVar[str] = "FedAdam (Reddi et al. 2021)"
    one_model: ClassVar[bool] = True
    mean_only: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    server_lr: PositiveFloat = 0.01  # eta, of which the paper searches a grid
    beta1: Decay = 0.9  # m <- beta1 m + (1 - beta1) Delta
    beta2: Decay = 0.99
    tau: PositiveFloat = 1e-3  # how far the step adapts: v begins at tau^2

    def init(self, server: Server) -> Message:
        return begun(server, self.tau)

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"]

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        return adapted(server, state, uploads, self, lambda v, square: self.beta2 * v + (1 - self.beta2) * square)


@dataclass(frozen=True)
class FedYogi(Method):
    """FedAvg with Yogi at the server: v <- v - (1 - beta2) Delta^2 sign(v - Delta^2), and the model moves by eta m /
    (sqrt(v) + tau)."""

    paper: ClassVar[str] = "FedYogi (Reddi et al. 2021)"
    one_model: ClassVar[bool] = True
    mean_only: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    server_lr: PositiveFloat = 0.01  # eta, of which the paper searches a grid
    beta1: Decay = 0.9  # m <- beta1 m + (1 - beta1) Delta
    beta2: Decay = 0.99
    tau: PositiveFloat = 1e-3  # how far the step adapts: v begins at tau^2

    def init(self, server: Server) -> Message:
        return begun(server, self.tau)

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"]

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        return adapted(
            server, state, uploads, self, lambda v, square: v - (1 - self.beta2) * square * (v - square).sign()
        )


def begun(server: Server, tau: float) -> Message:
    """The server's state before round 1."""
    model = server.initial()
    return {"model": model, "momentum": 0 * model.row, "second": 0 * model.row + tau**2}


def adapted(
    server: Server, state: Message, uploads: list[Upload], method: FedAdagrad | FedAdam | FedYogi, second: Second
) -> Message:
    """One step of Algorithm 2, on the mean of the updates; without any the state as it is."""
    if not uploads or not server.enough(len(uploads)):
        return state
    delta = mean_update(server, uploads)
    momentum = method.beta1 * state["momentum"] + (1 - method.beta1) * delta.row
    v = second(state["second"], delta.row.square())
    step = method.server_lr * momentum / (v.sqrt() + method.tau)
    return {"model": moved(state["model"], delta, step), "momentum": momentum, "second": v}


def moved(model: State, delta: State, step: Tensor) -> State:
    """The model after a step of its row; running statistics go with the mean, as they are no parameters."""
    return State(model.layout, model.row + step, (model + delta).extras)
