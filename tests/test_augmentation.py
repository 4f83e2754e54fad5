"""Shifted and mirrored training pictures: the pictures themselves, and who trains on them."""

from dataclasses import replace
from itertools import product

import pytest
import tiny
import tiny_images
import torch
from tiny_images import BATCHES, LORA, assert_state
from torch.nn import functional

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.engine import Engine
from llm_fed.engine.fit import fit
from llm_fed.experiment import run
from llm_fed.kinds.images import Pictures
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Distillation, Fit, augmented, moved
from llm_fed.models.structure import Full
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile


@pytest.mark.parametrize("flip", [False, True])
def test_each_picture_is_shifted_and_mirrored_by_itself(flip):
    """Of 16 x 24 pixels: by up to two up and down, and three left and right."""
    pixels = torch.randint(1, 256, (60, 3, 16, 24), dtype=torch.uint8)
    found = moved(pixels, torch.Generator().manual_seed(0), flip=flip)
    places = list(product(range(5), range(7), (False, True)))
    drawn = set()
    for before, after in zip(functional.pad(pixels, (3, 3, 2, 2)), found, strict=True):
        windows = [before[:, y : y + 16, x : x + 24] for y, x, _ in places]
        windows = [w.flip(2) if mirrored else w for w, (_, _, mirrored) in zip(windows, places, strict=True)]
        (place,) = [place for place, window in zip(places, windows, strict=True) if torch.equal(window, after)]
        drawn.add(place)
    assert {y for y, _, _ in drawn} == set(range(5)) and {x for _, x, _ in drawn} == set(range(7))
    assert {mirrored for _, _, mirrored in drawn} == ({False, True} if flip else {False})


ADAM = Optimizer(0.02, "adam")


def by_hand(job: Fit) -> Fit:
    """The same job on pictures that were augmented beforehand."""
    plain = [replace(job, augment=None).batch(step) for step in range(len(job.batches))]
    seen = [augmented(batch, job.augment, generator(job.seed, "augment", step)) for step, batch in enumerate(plain)]
    assert not torch.equal(seen[0][0].pixels, plain[0][0].pixels)
    return tiny.fit_on(job.site, job.structure, job.start, seen, job.optimizer, seed=job.seed)


@pytest.mark.parametrize("how", ["crop", "crop-flip"])
def test_a_whole_model_trains_on_them(how):
    base = tiny_images.resnet()
    start = tiny_images.party(base, BATCHES[0]).initial()
    job = tiny.fit_on("c0", Full(), start, BATCHES, ADAM, seed=5, augment=how)
    found, expected = (Engine(base).execute([one])[0] for one in (job, by_hand(job)))
    assert found.state.equal(expected.state) and found.losses == expected.losses


def test_adapters_train_on_them_whoever_else_trains():
    """Three clients in one pass, of other draws each, and one of them alone."""
    base = tiny_images.vit()
    start = tiny_images.party(base, BATCHES[0], structure=LORA).initial()
    jobs = [
        tiny.fit_on(f"c{seed}", LORA, start, BATCHES[:3], ADAM, seed=seed, augment="crop-flip") for seed in range(3)
    ]
    model = AdaptedModel(base.model, LORA, Pictures.of(base, LORA))
    found, _ = fit(model, jobs)
    expected, _ = fit(model, [by_hand(job) for job in jobs])
    (alone,), _ = fit(model, jobs[1:2])
    for one, other in zip(found, expected, strict=True):
        assert one.state.equal(other.state)
    assert_state(found[1].state, alone.state.tensors(), 1e-10)
    assert not found[0].state.equal(found[1].state)


def test_a_pupil_sees_what_its_teachers_saw():
    """Of whole models and of adapters."""
    for base, structure in ((tiny_images.cnn(), Full()), (tiny_images.vit(), LORA)):
        found = []
        for how in (None, "crop-flip"):
            local = replace(tiny_images.LOCAL, augment=how)
            site = tiny_images.party(base, BATCHES[0], structure=structure, local=local, lr=0.02)
            start, loss = site.initial(), Distillation([site.initial("a teacher")])
            found.append(tiny_images.answer(Engine(base), site.fit(start, loss=loss)))
        assert found[0].equal(found[1]) and not found[0].equal(start)


@pytest.mark.parametrize("base", [{"name": "cnn", "dtype": "float32"}, {"name": "resnet-9", "dtype": "float32"}])
def test_a_run_trains_on_them_and_its_seed_says_how(base, tmp_path):
    data = tiny_images.npz(tmp_path / "data.npz", test=6)

    def losses(name: str, **local) -> list[float]:
        config = configfile.from_dict(tiny_images.tree(data, base=base, rounds=1, local=local))
        run.train(config, tmp_path / name)
        return [line["loss"] for line in read_records(tmp_path / name / "metrics.jsonl") if line["kind"] == "round"]

    assert losses("one", augment="crop") == losses("again", augment="crop")
    assert len({tuple(losses(f"{how}", augment=how)) for how in (None, "crop", "crop-flip")}) == 3


def test_it_is_refused_for_text_and_by_other_names(small, tmp_path):
    with pytest.raises(UserError, match="local.augment is for images, but files is text; leave it out"):
        run.train(configfile.from_dict(small.tree(local={"augment": "crop"})), tmp_path)
    with pytest.raises(UserError, match="local.augment='flip' is unknown.*known: crop, crop-flip"):
        configfile.from_dict(small.tree(local={"augment": "flip"}))
