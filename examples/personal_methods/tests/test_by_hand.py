"""Each method on losses in one or two numbers, against its paper's formulas, worked out in the docstrings."""

from __future__ import annotations

import math

import pytest
from personal_methods.apfl import APFL
from personal_methods.fedala import FedALA
from personal_methods.fedamp import FedAMP
from personal_methods.fedper import FedPer
from personal_methods.fedrep import FedRep
from quadratic import Loss, numbers, serve, site, state

from llm_fed.basics.errors import UserError


def together(target: float) -> Loss:
    """(body + head - target)^2 / 2, in which the two layers share one residual."""

    def gradient(body: float, head: float) -> dict[str, float]:
        return {"body": body + head - target, "head": body + head - target}

    return Loss(gradient)


def apart(body: float, head: float) -> Loss:
    """((b - body)^2 + (h - head)^2) / 2, whose gradient is the distance."""
    return Loss(
        lambda **at: {"body": at["body"] - body, "head": at["head"] - head},
        lambda **at: ((at["body"] - body) ** 2 + (at["head"] - head) ** 2) / 2,
    )


def test_fedper_by_hand():
    """Both layers go half of the way to (4, 8) and to (8, -8). The bodies 2 and 4, of clients with 1 and 3 examples,
    average to 3.5. In round 2 the first client starts from that and from its own head 4."""
    method, server = FedPer(), site("server")
    ann, bob = site("ann", 1), site("bob", 3)
    held = method.init(server)
    assert numbers(held) == {"body": 0.0}
    up = apart(4, 8).run(method.client_update(ann, held)), apart(8, -8).run(method.client_update(bob, held))
    held = serve(method, server, held, ann=(up[0], 1), bob=(up[1], 3))
    assert numbers(held) == {"body": 3.5}
    assert numbers(apart(4, 8).run(method.personalize(ann, held))) == {"body": 3.5, "head": 4.0}
    assert numbers(apart(4, 8).run(method.personalize(bob, held))) == {"body": 3.5, "head": -4.0}
    assert numbers(apart(4, 8).run(method.client_update(ann, held))) == {"body": 0.25}
    assert numbers(apart(4, 8).run(method.personalize(ann, held))) == {"body": 3.5, "head": 6.0}
    assert serve(method, server, held).equal(held)


def test_fedrep_by_hand():
    """The head takes two steps with the body fixed at 0: 2, then 3 of 4. Then the body takes one with the head at 3:
    1/2. In the other order the body would be at 2. Representations count alike, whatever their clients hold."""
    method, server, ann = FedRep(head_steps=2), site("server"), site("ann")
    loss = together(4)
    up = loss.run(method.client_update(ann, method.init(server)))
    assert numbers(up) == {"body": 0.5} and [len(job.batches) for job in loss.asked] == [2, 1]
    held = serve(method, server, state(body=0.0), ann=(up, 1), bob=(state(body=1.5), 3))
    assert numbers(held) == {"body": 1.0}
    assert numbers(loss.run(method.personalize(ann, held))) == {"body": 1.0, "head": 3.0}
    assert serve(method, server, held).equal(held)


def test_layers_that_leave_nothing_are_refused():
    for method in (FedPer(personal_layers=2), FedRep(personal_layers=2)):
        with pytest.raises(UserError, match="the last 2 layers of a model with 2"):
            method.init(site("server"))


def test_apfl_by_hand():
    """The loss of the body is (b - 4)^2 / 2, rates are 1/10, alpha begins at 1/2, w and v at 0.

    Step 1: at the mixture 0 the gradient is -4. alpha stays, as v = w. w = 0.4, v = 0.1 * 0.5 * 4 = 0.2.
    Step 2: at the mixture 0.3 it is -3.7, the slope of alpha (0.2 - 0.4) * -3.7 = 0.74, alpha = 0.5 - 0.074 = 0.426;
    w = 0.4 + 0.36 = 0.76; v = 0.2 + 0.1 * 0.5 * 3.7 = 0.385. Both steps of a pair see one batch.
    """
    method, ann = APFL(), site("ann", 6, steps=2, batch_size=2)
    ann.begin(1, 0.1)
    loss = apart(4, 0)
    up = loss.run(method.client_update(ann, method.init(site("server"))))
    assert numbers(up)["body"] == pytest.approx(0.76)
    assert ann.memory["alpha"] == pytest.approx(0.426) and numbers(ann.memory["v"])["body"] == pytest.approx(0.385)
    gradients, fits = loss.asked[::2], loss.asked[1::2]
    assert [sorted(g.examples) for g in gradients] == [sorted(f.examples) for f in fits]
    assert [sorted(f.batches[0]) for f in fits] == [[0, 1], [0, 1]]
    mine = loss.run(method.personalize(ann, state(body=1.0, head=0.0)))
    assert numbers(mine)["body"] == pytest.approx(0.426 * 0.385 + 0.574 * 1.0)
    fresh = loss.run(method.personalize(site("bob"), state(body=1.0, head=0.0)))
    assert numbers(fresh)["body"] == pytest.approx(0.5)
    held = serve(method, site("server"), state(body=0.0, head=0.0), a=(up, 1), b=(0 * up, 9))
    assert numbers(held)["body"] == pytest.approx(0.38)


def test_apfl_between_its_ends():
    """With alpha 0 the personal model is the global one; alpha does not leave [0, 1]; other optimizers are refused."""
    for alpha, adaptive in ((0.0, False), (1.0, False), (0.5, True)):
        method, ann, loss = APFL(alpha, adaptive), site("ann", steps=3), apart(400, 0)
        loss.run(method.client_update(ann, state(body=0.0, head=0.0)))
        assert ann.memory["alpha"] == alpha if not adaptive else 0 <= ann.memory["alpha"] <= 1
        sent = state(body=7.0, head=0.0)
        assert loss.run(method.personalize(ann, sent)).equal(sent) == (ann.memory["alpha"] == 0)
    for settings in ({"optimizer": "adamw"}, {"momentum": 0.9}):
        with pytest.raises(UserError, match="local.optimizer=sgd"):
            APFL().init(site("server", **settings))


def test_fedala_by_hand():
    """A client at (2, 2) is sent (10, 6); the last layer alone has a weight, the gap there is 4, the target is (0, 3).

    Pass 1: at head 2 + 4 * 1 = 6 the gradient is 3, the weight 1 - 0.05 * 3 * 4 = 0.4.
    Pass 2: at head 3.6 it is 0.6, the weight 0.4 - 0.12 = 0.28, hence the start (10, 3.12), and from there half of the
    way to the target. The next round begins with this weight, and has one pass: sent (10, 5.06), the gap is 2, at head
    3.06 + 0.56 = 3.62 the gradient is 0.62, the weight 0.28 - 0.05 * 0.62 * 2 = 0.218.
    """
    method, ann = FedALA(weight_lr=0.05, first_epochs=2), site("ann")
    loss = apart(0, 3)
    assert numbers(apart(4, 4).run(method.client_update(ann, state(body=0.0, head=0.0)))) == {"body": 2, "head": 2}
    up = loss.run(method.client_update(ann, state(body=10.0, head=6.0)))
    assert float(ann.memory["weights"]) == pytest.approx(0.28)
    assert numbers(loss.asked[-1].start) == pytest.approx({"body": 10, "head": 3.12})
    assert numbers(up) == pytest.approx({"body": -5, "head": 3.06 - 6})
    assert numbers(loss.run(method.personalize(ann, state(body=1.0, head=1.0)))) == pytest.approx(
        {"body": 5, "head": 3.06}
    )
    loss.run(method.client_update(ann, state(body=10.0, head=5.06)))
    assert float(ann.memory["weights"]) == pytest.approx(0.218)


def test_fedala_learns_its_first_weights_until_losses_stand_still():
    """Of a loss that does not change ten are looked at, and weights do not leave [0, 1]; on 3 of 10 batches, as the
    share says."""
    method, ann = FedALA(share=0.3, weight_lr=100.0), site("ann", 10)
    loss = Loss(lambda **at: {"body": 0.0, "head": 1.0}, lambda **at: 5.0)
    loss.run(method.client_update(ann, state(body=0.0, head=0.0)))
    loss.run(method.client_update(ann, state(body=0.0, head=6.0)))
    assert float(ann.memory["weights"]) == 0.0
    assert len(loss.asked) == 2 + 11 * 3


def test_fedamp_by_hand():
    """Bodies at 0, 1 and 3, sigma 2, alpha 1/2: A'(x) = exp(-x / 2) / 2. Client 0 gets 1/4 exp(-1/2) of client 1 and
    1/4 exp(-9/2) of client 2. Its model then goes, at a rate of 1/2, along the gradient of (b - 4)^2 / 2 and of
    lambda / (2 alpha) (b - u)^2."""
    method, server = FedAMP(alpha=0.5, sigma=2.0, strength=0.3), site("server")
    server.clients = ("c0", "c1", "c2")
    held = method.init(server)
    assert numbers(method.broadcast(held, "c0")) == {"body": 0.0, "head": 0.0}
    models = {f"c{i}": (state(body=float(body), head=0.0), i + 1) for i, body in enumerate((0, 1, 3))}
    held = serve(method, server, held, **models)
    near, far = math.exp(-1 / 2) / 4, math.exp(-9 / 2) / 4
    u = near * 1 + far * 3
    sent = method.broadcast(held, "c0")
    assert numbers(sent)["body"] == pytest.approx(u)
    other = math.exp(-4 / 2) / 4
    assert numbers(method.broadcast(held, "c1"))["body"] == pytest.approx(1 - near * 1 + other * (3 - 1))
    assert method.report(held)["shares"]["c0"] == pytest.approx({"c1": near, "c2": far}, rel=1e-5)
    c0 = site("c0")
    c0.memory["model"] = state(body=1.0, head=0.0)
    theta = apart(4, 0).run(method.client_update(c0, sent))
    assert numbers(theta)["body"] == pytest.approx(1 - 0.5 * ((1 - 4) + 0.3 / 0.5 * (1 - u)))
    assert apart(4, 0).run(method.personalize(c0, sent)).equal(theta)
    assert serve(method, server, held) == held


def test_fedamp_refuses_shares_beyond_one():
    server = site("server")
    server.clients = tuple("abc")
    with pytest.raises(UserError, match="more than 1 together"):
        FedAMP(alpha=0.6, sigma=1.0).init(server)
    with pytest.raises(UserError, match="leave local.proximal out"):
        FedAMP().init(site("server", proximal=0.1))
