"""The engine: it computes what sites await. Adapters of one structure share passes over the frozen base, whole models
take turns; what depends on the kind of model and data is asked of the base.

Shape letters: N examples, C classes, H features, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import ClientError, UserError
from llm_fed.engine import fit, gradients, inference
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.capture import Captures
from llm_fed.engine.trainable import Answering, Handler, Item, Trainable, in_chunks
from llm_fed.engine.ways import ANSWERED, Ways, untried, ways
from llm_fed.engine.whole import WholeModel
from llm_fed.merge.delta import under
from llm_fed.merge.moments import Evidence
from llm_fed.method.client import Client
from llm_fed.method.requests import (
    Answers,
    Features,
    Fit,
    FitHead,
    Fitted,
    Gradient,
    GradientMoments,
    Logits,
    MeanLosses,
    Request,
    Result,
    Work,
)
from llm_fed.models.joined import Answer
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.settings.config import EngineConfig, EvalConfig
from llm_fed.state import State


@dataclass(eq=False)
class Engine:
    """Answers the requests of all sites.

    Attributes:
        answering: by type of request, and whether adapters are trained, what answers it.
        budget: most tokens of a micro-batch, found at the first training; it decides the packing, hence the bits.
        work: of all training since it was last taken.
        captures: of training passes; None: they run as they are written.
        ways: how training passes are computed.
        untried: why `engine.fast=auto` leaves passes of this run as they are written on its GPU; else empty.
    """

    base: Trainable
    evaluation: EvalConfig = EvalConfig()
    work: Work = field(default_factory=Work)
    budget: int | None = None
    captures: Captures | None = None
    ways: Ways = Ways(False, False, "")
    untried: str = ""
    _whole: dict[Structure, WholeModel] = field(default_factory=dict)

    def configure(self, config: EngineConfig, sites: Iterable[Client], captures: Captures | None = None) -> None:
        """Compute as a configuration says, with the captures of other runs on the same base, where there are some.
        `sites`: who may train. UserError: the base's autocast is float16."""
        if config.fast == "auto" and self.base.device.type == "cuda":
            self.untried = untried(self.base.model, structures=dict.fromkeys(site.structure for site in sites))
        if self.base.autocast == torch.float16:
            raise UserError("base.dtype=float16 would lose small gradients; use bfloat16 or float32")
        dtype = str(self.base.autocast).removeprefix("torch.")
        self.ways = ways(config.fast, self.base.device, dtype, tried=not self.untried)
        if self.ways.captured:
            self.captures = captures or Captures()
            self.captures.said.clear()
            self.captures.answers = config.fast == "on" or not untried(self.base.model, ANSWERED)

    def execute(self, requests: Sequence[Request[Result]]) -> Sequence[Result]:
        """One result, or one exception, for each of these requests of one type and structure. UserError: neither the
        engine nor the base's kind answers requests of this type."""
        requested, fused = type(requests[0]), requests[0].structure.fused
        for who, more in ((self, ()), (self.base, (self,))):
            if answer := who.answering.get((requested, fused)):
                if answer.each:
                    return [answer.method(who, request, *more) for request in requests]
                return answer.method(who, requests, *more)
        known = [each.__name__ for each, of in (*self.answering, *self.base.answering) if of == fused]
        what = f"{'adapters of a' if fused else 'whole'} {self.base.noun}{'' if fused else 's'}"
        raise UserError(
            f"the method needs {requested.__name__}, which {what} do not support (they support "
            f"{', '.join(sorted(known))}); choose another base or method"
        )

    def free(self) -> None:
        """Give back memory that can be filled again."""
        if self.captures:
            self.captures.clear()

    def take_work(self) -> Work:
        """The training work since the last call."""
        taken, self.work = self.work, Work()
        return taken

    def adapted(self, structure: Structure) -> AdaptedModel:
        """The base under adapters of this structure."""
        base = self.base
        assert isinstance(structure, Lora)
        return AdaptedModel(
            base.model, structure, base.examples(structure), base.autocast, self.budget, self.captures,
            self.ways.padding_free, bool(self.ways.fused),
        )  # fmt: skip

    def whole(self, structure: Structure) -> WholeModel:
        """The model, or models side by side, that clients of this structure train whole."""
        if structure not in self._whole:
            self._whole[structure] = WholeModel(self.base, structure)
        return self._whole[structure]

    def fit(self, requests: Sequence[Fit]) -> Sequence[Fitted | ClientError]:
        if len(requests) > 1 and any(request.teachers for request in requests):
            return [self.fit([request])[0] for request in requests]  # each has teachers of its own
        if len({request.private is None for request in requests}) > 1:
            raise ValueError("fits with privacy and fits without it do not train in one pass")
        model = self.adapted(requests[0].structure)
        if any(callable(request.loss) for request in requests) and not model.examples.replaceable:
            raise UserError(
                "client.fit(loss=FUNCTION) takes the place of the loss of tokens, but objective.name has chosen one on "
                "preferences; set objective.name=sft, or choose another method"
            )
        results, work = fit.fit(model, requests)
        if self.untried and not work.requested:
            work = replace(work, requested=("captured",), why=self.untried)
        self.budget = work.budget or self.budget  # found once, then kept: the packing decides the bits of a result
        self.work = self.work.plus(work)
        return results

    def fit_whole(self, request: Fit) -> Fitted | ClientError:
        result, work = self.whole(request.structure).fit(request)
        self.work = self.work.plus(work)
        return result

    def mean_losses(self, request: MeanLosses) -> list[float]:
        """Each client alone: it may ask for many states, and its examples fill micro-batches by themselves."""
        model = self.adapted(request.structure)
        requested = [(row, request.examples) for row in range(len(request.states))]
        beside = [(state, example) for state in request.states for example in request.examples]
        mix = self._mixing_weights(request.structure, beside)
        return inference.mean_losses(model, model.bank_of(request.states), requested, mix=mix)

    def mean_losses_whole(self, request: MeanLosses) -> list[float]:
        model = self.whole(request.structure)
        labels = model.examples.collate(request.examples).labels
        logits = (model.answer(state, request.examples).logits for state in request.states)
        return [float(nn.functional.cross_entropy(each, labels)) for each in logits]

    def gradient_moments(self, requests: Sequence[GradientMoments]) -> Sequence[Evidence | ClientError]:
        model = self.adapted(requests[0].structure)
        if model.structure.gate == "mix" or any(under(request.first) or under(request.second) for request in requests):
            raise UserError(
                "gradient moments need plain adapters, but this method weighs two of them by each prompt, or adds "
                "frozen weights beneath them"
            )
        return gradients.evidence(model, requests)

    def gradient(self, request: Gradient) -> tuple[float, State]:
        """With another head, which is fixed, the gradient of the model's own head is zero."""
        model = self.adapted(request.structure)
        if request.head is not None:
            model = replace(model, examples=model.examples.under_head(request.head))
        mix = self._mixing_weights(request.structure, [(request.state, example) for example in request.examples])
        return gradients.mean_gradient(model, request, mix)

    def features(self, requests: Sequence[Features]) -> Sequence[Tensor]:
        examples = [example for request in requests for example in request.examples]
        counts = [len(request.examples) for request in requests]
        return self.base.features(requests[0].structure, examples).split(counts)

    def logits(self, requests: Sequence[Logits]) -> Sequence[Tensor]:
        return [answer.logits for answer in self._answer(requests)]

    def heads(self, requests: Sequence[FitHead]) -> Sequence[State]:
        """For each the linear head (weight, bias) that classifies the features of its examples best."""
        examples, answers = self.base.examples(requests[0].structure), self._answer(requests)
        labels = [examples.collate(requested.examples).labels for requested in requests]
        return [_fit_head(answer.features, *more) for answer, *more in zip(answers, labels, requests, strict=True)]

    def _answer(self, requests: Sequence[Logits | FitHead | Answers]) -> Sequence[Answer]:
        """What a classifier makes of each request's examples under its state, in float32 at least, on the CPU."""
        structure = requests[0].structure
        if not structure.fused:
            return [self.whole(structure).answer(each.state, each.examples) for each in requests]
        examples = [example for each in requests for example in each.examples]
        index = torch.tensor([row for row, each in enumerate(requests) for _ in each.examples])
        bank = self.adapted(structure).bank_of([each.state for each in requests])
        requested = [(each.state, example) for each in requests for example in each.examples]
        mix = self._mixing_weights(structure, requested)
        answer = in_chunks(
            self.base, self.base.examples(structure), examples,
            lambda part: bank.attached(index[part], mix=None if mix is None else mix[part]),
        )  # fmt: skip
        return answer.split([len(each.examples) for each in requests])

    def _mixing_weights(self, structure: Structure, requested: Sequence[tuple[State, Item]]) -> Tensor | None:
        """(len(requested), 2): the experts' weights for each example under the state beside which it stands; None
        unless there are examples that decide them."""
        if not isinstance(structure, Lora) or structure.gate != "mix" or not requested:
            return None
        own = self.base.features(structure, [example for _, example in requested])
        return inference.similarity_weights(own, [state for state, _ in requested])

    answering: ClassVar[Answering] = {
        (Fit, True): Handler(fit),
        (Fit, False): Handler(fit_whole, each=True),
        (MeanLosses, True): Handler(mean_losses, each=True),
        (MeanLosses, False): Handler(mean_losses_whole, each=True),
        (GradientMoments, True): Handler(gradient_moments),
        (Gradient, True): Handler(gradient, each=True),
        (Gradient, False): Handler(lambda self, request: self.whole(request.structure).gradient(request), each=True),
        (Features, True): Handler(features),
        (Logits, True): Handler(logits),
        (Logits, False): Handler(logits),
        (FitHead, True): Handler(heads),
        (FitHead, False): Handler(heads),
        (Answers, False): Handler(_answer),
    }


def _fit_head(features: Tensor, labels: Tensor, requested: FitHead) -> State:
    """The linear head (weight, bias) trained, by Adam, on the features (N, H) of its examples and their labels (N,)."""
    features = features.to(requested.head.row)
    parameters = [nn.Parameter(tensor.clone()) for tensor in requested.head.tensors().values()]
    optimizer = torch.optim.Adam(parameters, lr=requested.lr)
    for batch in requested.batches:
        optimizer.zero_grad()
        chosen = torch.tensor(batch)
        logits = nn.functional.linear(features[chosen], *parameters)
        nn.functional.cross_entropy(logits, labels[chosen]).backward()
        optimizer.step()
    return State.of(dict(zip(requested.head, parameters, strict=True)))
