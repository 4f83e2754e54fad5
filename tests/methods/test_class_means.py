"""What is exchanged by class, or of the head alone: FD, FedProto and LG-FedAvg against plain computations."""

from collections.abc import Sequence
from typing import Any

import pytest
import tiny_images
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss, softmax
from unlike import LOCAL, LR, C, Federation, H, assert_entries, of_classes, seen

from llm_fed.engine.engine import Engine
from llm_fed.method.heads import class_means
from llm_fed.methods.fd import FD
from llm_fed.methods.fedproto import FedProto
from llm_fed.methods.lg_fedavg import LGFedAvg
from llm_fed.state import State
from llm_fed.tasks.common import Picture

ARCHITECTURES = ("", "resnet-9")
PARTS = (of_classes(0, 1, 1, 0, 1), of_classes(1, 1, 2), of_classes(3), of_classes(0, 2, 2, 2))


def test_means_by_class():
    """Class 0: (1 + 5) / 2 and (2 + 4) / 2; class 2: its only row; class 1 has none."""
    means, counts = class_means(torch.tensor([[1.0, 2], [7, 8], [5, 4]]), torch.tensor([0, 2, 0]), 3)
    assert means.tolist() == [[3, 3], [0, 0], [7, 8]] and counts.tolist() == [2, 0, 1]


def plain_means(values: Tensor, pictures: Sequence[Picture]) -> dict[int, Tensor]:
    labels = sorted({picture.label for picture in pictures})
    return {
        label: torch.stack([v for v, p in zip(values, pictures, strict=True) if p.label == label]).mean(0)
        for label in labels
    }


def fit_alone(run: Federation, name: str, architecture: str, start: State, loss: Any) -> nn.Module:
    """A model that takes the client's steps of this round; `loss(logits, features, labels)`."""
    module = run.module(architecture, start)
    optimizer = torch.optim.Adam(module.parameters(), lr=LR)
    for inputs, labels in run.batches(name, run.clients[name].train):
        optimizer.zero_grad()
        loss(*seen(module, inputs), labels).backward()
        optimizer.step()
    return module


def test_fd_sends_the_mean_logits_of_the_trained_model():
    """In evaluation mode; of a class that it does not have zero."""
    run = Federation(FD(), *PARTS, architectures=ARCHITECTURES)
    for upload in run.round(1):
        own = run.clients[upload.client].train
        means = plain_means(run.answers(upload.client, run.personal(upload.client), own).logits, own)
        assert [label for label in range(C) if upload.content["seen"][label]] == list(means)
        for label in range(C):
            wanted = means.get(label, torch.zeros(C, dtype=torch.float64))
            torch.testing.assert_close(upload.content["logits"][label], wanted, rtol=0, atol=1e-12)


def test_fd_is_sent_the_mean_of_the_others_that_have_the_class():
    """Newest answers: client c1's are of round 2. Nobody but c2 has class 3."""
    run = Federation(FD(), *PARTS, architectures=ARCHITECTURES)
    newest = {upload.client: upload.content for upload in run.round(1)}
    assert torch.equal(run.state["clients"], torch.tensor([2.0, 2, 2, 1]))
    newest |= {upload.client: upload.content for upload in run.round(2, "c1")}
    for name in run.clients:
        message = run.message(name)
        for label in range(C):
            others = [sent["logits"][label] for who, sent in newest.items() if who != name and sent["seen"][label]]
            assert bool(message["seen"][label]) == bool(others)
            wanted = torch.stack(others).mean(0) if others else torch.zeros(C, dtype=torch.float64)
            torch.testing.assert_close(message["logits"][label], wanted, rtol=0, atol=1e-12)
    assert run.message("c2")["seen"].tolist() == [True, True, True, False]
    assert run.message("stranger")["seen"].all()


@pytest.mark.parametrize("name, architecture", [("c0", ""), ("c1", "resnet-9"), ("c2", "")])
def test_fd_is_a_plain_loop(name, architecture):
    """Round 2: cross-entropy with the labels, and 0.7 times that with the softmax of the others' mean logits."""
    run = Federation(FD(regularization=0.7), *PARTS, architectures=ARCHITECTURES)
    run.round(1)
    start, sent = run.personal(name), run.message(name)
    run.ask(2, name)

    def loss(logits: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        total = cross_entropy(logits, labels)
        for row, label in zip(logits, labels.tolist(), strict=True):
            if sent["seen"][label]:
                soft = -(softmax(sent["logits"][label], 0) * log_softmax(row, 0)).sum()
                total = total + 0.7 * soft / len(labels)
        return total

    expected = fit_alone(run, name, architecture, start, loss)
    assert_entries(run.clients[name].memory["model"], expected)


def test_fedproto_sends_the_mean_features_of_the_trained_model():
    run = Federation(FedProto(), *PARTS, architectures=ARCHITECTURES)
    for upload in run.round(1):
        own = run.clients[upload.client].train
        means = plain_means(run.answers(upload.client, run.personal(upload.client), own).features, own)
        assert upload.content["counts"].tolist() == [sum(p.label == label for p in own) for label in range(C)]
        for label in range(C):
            wanted = means.get(label, torch.zeros(H, dtype=torch.float64))
            torch.testing.assert_close(upload.content["prototypes"][label], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("known", [(True, True, True, True), (True, False, True, True)])
def test_fedproto_can_classify_by_the_nearest_prototype(known):
    run = Federation(FedProto(classifier="prototypes"), *PARTS, architectures=ARCHITECTURES)
    run.round(1)
    run.state["known"] = torch.tensor(known)
    prototypes, found = run.state["prototypes"], set()
    for name in run.clients:
        answers = run.answers(name, run.personal(name), [picture for part in PARTS for picture in part])
        away = (answers.features[:, None] - prototypes).square().sum(2)
        away[:, ~torch.tensor(known)] = torch.inf
        assert torch.equal(answers.logits.argmax(1), away.argmin(1))
        found |= set(away.argmin(1).tolist())
    assert len(found) > 1


def test_fedproto_weighs_by_examples():
    """Class 1: three examples of c0, two of c1; class 3, of c2 alone, stays when c2 is not asked."""
    run = Federation(FedProto(), *PARTS, architectures=ARCHITECTURES)
    assert not run.state["known"].any()
    sent = {upload.client: upload.content["prototypes"] for upload in run.round(1)}
    expected = (3 * sent["c0"][1] + 2 * sent["c1"][1]) / 5
    torch.testing.assert_close(run.state["prototypes"][1], expected, rtol=0, atol=1e-12)
    first = run.state["prototypes"]
    (second,) = run.round(2, "c1")
    torch.testing.assert_close(run.state["prototypes"][1:3], second.content["prototypes"][1:3], rtol=0, atol=1e-12)
    assert torch.equal(run.state["prototypes"][3], first[3]) and run.state["known"].all()
    again = run.state
    run.step(3, [])
    assert torch.equal(run.state["prototypes"], again["prototypes"])


@pytest.mark.parametrize("name, architecture", [("c0", ""), ("c1", "resnet-9"), ("c2", "")])
def test_fedproto_is_a_plain_loop(name, architecture):
    """Round 2; nobody has sent class 3, so client c2 learns from its label alone."""
    run = Federation(FedProto(regularization=5.0), *PARTS, architectures=ARCHITECTURES)
    run.round(1, "c0", "c1", "c3")
    start, sent = run.personal(name), run.message(name)
    assert sent["known"].tolist() == [True, True, True, False]
    run.ask(2, name)

    def loss(logits: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        total = cross_entropy(logits, labels)
        for row, label in zip(features, labels.tolist(), strict=True):
            if label != 3:
                total = total + 5.0 / len(labels) * mse_loss(row, sent["prototypes"][label])
        return total

    expected = fit_alone(run, name, architecture, start, loss)
    assert_entries(run.clients[name].memory["model"], expected)


def test_the_head_of_lg_fedavg_is_found_by_what_it_is():
    """A classifier of transformers' in its server's model, heads of our own at the clients."""
    method = LGFedAvg()
    base = tiny_images.resnet()
    site = tiny_images.party(base, of_classes(0, 1), local=LOCAL)
    assert list(method.init(site)) == ["head.weight", "head.bias"]
    site = tiny_images.party(base, tiny_images.pictures(5, size=16), local=LOCAL)
    start = site.initial()
    message = method.init(site)
    engine = Engine(base)
    update = tiny_images.answer(engine, method.client_update(site, message))
    personal = tiny_images.answer(engine, method.personalize(site, message + update))
    assert not torch.equal(personal["classifier.1.weight"], start["classifier.1.weight"])
    assert torch.equal(personal["classifier.1.weight"], (message + update)["head.weight"])
    assert "classifier.1.weight" not in site.memory["own"] and len(site.memory["own"].extras) > 0
