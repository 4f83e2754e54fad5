"""Does a row of a base depend on its neighbours? Tries a family that transformers can make, in a variant of its
configuration: training, losses, gradients, features, option scores and answers of rows beside others against the same
rows alone, and both against the stock model."""

import copy
import re
from dataclasses import dataclass, field, replace
from typing import Any

import every_family
import tiny
import torch
from stock_training import per_example_gradients
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llm_fed.basics.errors import RunError, UserError
from llm_fed.engine import generation, inference
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.fit import fit
from llm_fed.engine.passes import refusal
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.models.families import READ_LAYERS, check_family
from llm_fed.models.lora import Lora, draw
from llm_fed.models.rotary import regimes
from llm_fed.testing.tiny import VOCABULARY, language_base

EVERY = Lora(2, 4, 0.0, "all-linear")
LENGTHS = [5, 14, 16, 17, 30, 9]  # on both sides of every border and window
NEW = 4  # tokens of an answer


@dataclass
class Found:
    """What came out of one variant of a family; `wrong` says by check what is, nothing where all is equal."""

    refused: str = ""  # by us, in a sentence
    impossible: str = ""  # transformers cannot make it
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.impossible:
            return "not made"
        return "refused" if self.refused else "differs" if self.wrong else "equal"


class SideBySide(AdaptedModel):
    """All rows that the budget allows share a micro-batch, however unequal they are."""

    @property
    def overhead(self) -> int:
        return 10_000


class Trial:
    def __init__(self, family: str, changes: dict[str, Any], dtype: torch.dtype):
        self.model, self.dtype = every_family.build(family, dtype, **changes), dtype
        self._untouched = copy.deepcopy(self.model)
        self._logits: dict[tuple[int, ...], Tensor] = {}
        self._stock: tuple[Any, AdapterBank] | None = None
        self.close = 1e-5 if dtype == torch.float64 else 2e-3
        check_family(self.model.config, family)
        self.base = language_base(self.model)
        self.structure = self._adaptable()
        draws = torch.Generator().manual_seed(0)
        self.states = []
        for _ in range(2):
            fresh = draw(self.model, self.structure, draws, dtype)
            noise = torch.randn(fresh.row.shape, generator=draws, dtype=dtype)
            self.states.append(fresh.like(fresh.row + 0.05 * noise))
        self.bank = self._bank(self.model)
        self.prompts = [(n % 2, words(length, n)) for n, length in enumerate(LENGTHS)]
        begin = words(8, 99)
        self.shared = [(n % 2, begin + words(length, n)) for n, length in enumerate([1, 2, 6, 5])]

    def _adaptable(self) -> Lora:
        """The first of these that the family takes: every linear layer, those outside a mixture of experts, those of
        attention; some layers read all rows of a batch as one."""
        refused: Exception | None = None
        for structure in structures(self.model):
            try:
                bank = AdapterBank(self.model, structure, 1, self.dtype)
                with torch.no_grad(), bank.attached(torch.tensor([0])):
                    self.model(input_ids=torch.tensor([words(5, 0)]))
            except UserError as error:
                refused = error
            else:
                return structure
        raise refused or UserError("no layer can be adapted")

    def _bank(self, model: Any) -> AdapterBank:
        bank = AdapterBank(model, self.structure, 2, self.dtype)
        for k, state in enumerate(self.states):
            bank.load(k, state)
        return bank

    def stock(self) -> tuple[Any, AdapterBank]:
        """A model that transformers alone has touched; a fresh one where it would remember longer texts."""
        if self._stock is None or regimes(self.model) is not None:
            model = copy.deepcopy(self._untouched)
            self._stock = model, self._bank(model)
        return self._stock

    def model_with(self, budget: int) -> AdaptedModel:
        """With all rows in one micro-batch, or each in one of its own."""
        return SideBySide(self.model, self.structure, budget=budget)

    def logits(self, row: int, ids: list[int]) -> Tensor:
        """(T, V) of a text alone by the stock model, which is given the tokens and nothing else."""
        text = (row, *ids)
        if text not in self._logits:
            model, bank = self.stock()
            with torch.no_grad(), bank.attached(torch.tensor([row])):
                self._logits[text] = model(input_ids=torch.tensor([ids])).logits[0].double()
        return self._logits[text]

    # The checks: each raises AssertionError with what differs.

    def sees_no_future(self) -> None:
        ids = words(12, 5)
        for place in (6, 11):
            other = [*ids[:place], 2 + ids[place] % 40, *ids[place + 1 :]]
            self.equal(self.logits(0, ids)[:place], self.logits(0, other)[:place], "an earlier token sees a later one")
            self.equal(self.logits(0, ids)[:place], self.logits(0, ids[:place]), "an earlier token sees a later one")

    def losses(self) -> None:
        examples = [(n % 2, one) for n, one in enumerate(tiny.examples(1, LENGTHS))]
        asked = [(row, [example]) for row, example in examples]
        expected = []
        for row, example in examples:
            places = [p for p, counts in enumerate(example.target) if counts]
            each = self.logits(row, example.input_ids)[[p - 1 for p in places]].log_softmax(-1)
            expected.append(-each.gather(1, torch.tensor([[example.input_ids[p]] for p in places])).mean())
        for budget, how in ((4096, "together"), (1, "alone")):
            ours = inference.mean_losses(self.model_with(budget), self.bank, asked)
            self.equal(ours, expected, f"{how}, from the stock model's")

    def gradients(self) -> None:
        examples = tiny.examples(2, LENGTHS[:5])
        models = (self.model_with(budget) for budget in (4096, 1))
        together, alone = (per_example_gradients(model, self.states[0], examples) for model in models)
        self.equal(together / alone.abs().max(), alone / alone.abs().max(), "together, from alone")

    def training(self) -> None:
        self._training(self.model_with(4096))

    def training_end_to_end(self) -> None:
        """Of bases that allow it."""
        model = replace(self.model_with(4096), padding_free=True)
        if not refusal(model, self._jobs()):
            self._training(model)

    def _jobs(self) -> list[Fit]:
        return [
            tiny.fit_on(f"c{k}", self.structure, state, [tiny.examples(k, lengths)] * 2, Optimizer(0.01, name="sgd"))
            for k, (state, lengths) in enumerate(zip(self.states, ([30, 24, 17], [3, 9, 5]), strict=True))
        ]

    def _training(self, model: AdaptedModel) -> None:
        jobs = self._jobs()
        together, _ = fit(model, jobs)
        for job, result in zip(jobs, together, strict=True):
            (alone,), _ = fit(self.model_with(1), [job])
            for one in (result, alone):
                if isinstance(one, Exception):
                    raise one
            self.equal(result.state.row, alone.state.row, "together, from alone")

    def features(self) -> None:
        prompts = [prompt for _, prompt in self.prompts]
        alone = torch.cat([inference.features(self.base, [prompt]) for prompt in prompts])
        self.equal(inference.features(self.base, prompts), alone, "together, from alone")

    def answers(self) -> None:
        self._answers(self.prompts)

    def answers_with_a_shared_beginning(self) -> None:
        self._answers(self.shared)

    def options(self) -> None:
        asked = [(row, prompt, [words(1, 7), words(4, 8)]) for row, prompt in self.prompts]
        for size in (32, 1):
            scores = generation.option_log_likelihoods(self.base, self.bank, asked, batch_size=size)
            for (row, prompt, options), ours in zip(asked, scores, strict=True):
                for option, score in zip(options, ours, strict=True):
                    each = self.logits(row, prompt + option)[len(prompt) - 1 : -1].log_softmax(-1)
                    expected = each.gather(1, torch.tensor(option)[:, None]).sum()
                    self.equal([score], [expected], f"in batches of {size}, from the stock model's")

    def _answers(self, prompts: list[tuple[int, list[int]]]) -> None:
        batched, single = (
            generation.generate(self.base, self.bank, prompts, max_new_tokens=NEW, batch_size=size) for size in (32, 1)
        )
        assert batched == single, f"in a batch {first_difference(batched, single)} alone"
        expected = [self._stock_answer(*asked) for asked in prompts]
        assert single == expected, f"alone {first_difference(single, expected)} of the stock model"

    def _stock_answer(self, row: int, prompt: list[int]) -> str:
        """By the model's own generation; where that reads a text again, by reading it again for every token, as
        transformers 5.24 gives Phi-4 multimodal only the last token then."""
        known = regimes(self.model)
        if known is not None and known.read_again:
            text = list(prompt)
            while len(text) < len(prompt) + NEW and text[len(prompt) :][-1:] != [1]:
                text.append(int(self.logits(row, text)[-1].argmax()))
            return self._words(text[len(prompt) :])
        model, bank = self.stock()
        ids = torch.tensor([prompt])
        with bank.attached(torch.tensor([row])), torch.no_grad():
            said = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
            )
        return self._words(said[0, len(prompt) :].tolist())

    def _words(self, tokens: list[int]) -> str:
        tokens = tokens[: tokens.index(1)] if 1 in tokens else tokens
        return self.base.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def equal(self, ours: Any, theirs: Any, what: str) -> None:
        ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
        assert not ours.isnan().any(), "NaN"
        difference = float((ours - theirs).abs().max() / (1 + theirs.abs().max()))
        assert difference <= self.close, f"differs by {difference:.1e} ({what})"


CHECKS = (
    Trial.sees_no_future, Trial.losses, Trial.gradients, Trial.training, Trial.training_end_to_end, Trial.features,
    Trial.options, Trial.answers, Trial.answers_with_a_shared_beginning,
)  # fmt: skip


def words(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def first_difference(ours: list[str], theirs: list[str]) -> str:
    return next(f"{a!r}, {b!r}" for a, b in zip(ours, theirs, strict=True) if a != b)


def structures(model: Any) -> list[Lora]:
    """Every linear layer, then those outside a mixture of experts that can have adapters, then those that are named as
    layers of attention."""
    names = {name for name, _ in model.named_modules()}
    head = model.get_output_embeddings()
    outside = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and name.rpartition(".")[2] not in READ_LAYERS.get(model.config.model_type, ())
        and not any(f"{'.'.join(name.split('.')[:n])}.experts" in names for n in range(1, name.count(".") + 1))
    ]
    attention = [name for name in outside if re.search(r"attn|attention|mixer", name)]
    return [EVERY, *(Lora(2, 4, 0.0, "|".join(map(re.escape, some))) for some in (outside, attention) if some)]


def examine(family: str, changes: dict[str, Any]) -> Found:
    """In float64, or where that is not possible in float32."""
    found = Found()
    for dtype in (torch.float64, torch.float32):
        found = Found()
        try:
            trial = Trial(family, changes, dtype)
        except UserError as error:
            found.refused = str(error)
            break
        except Exception as error:
            found.impossible = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
            continue
        for check in CHECKS:
            try:
                check(trial)
            except (UserError, RunError) as error:
                found.refused = str(error)
                break
            except Exception as error:
                found.wrong[check.__name__] = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        if "computes NaN" not in found.refused:  # eager attention of padding alone does, in float64
            break
    return found
