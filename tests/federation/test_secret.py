"""The secret of a run with privacy: its numbers, its file, and that no other file or message holds it."""

import base64
import io
import json
import math
import shutil
import stat
from pathlib import Path

import equal_runs
import pytest
import torch
import toy
from equal_runs import StopsAfter
from hub_server import connected
from network import NetworkInProcess
from rich.console import Console
from scipy import stats
from small_run import CLIENTS
from toy_rounds import TARGETS, go

from llm_fed.audit.audit import audit
from llm_fed.basics import documents
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.rng import Secret
from llm_fed.experiment import run
from llm_fed.federation.schedule import Poisson
from llm_fed.network import server
from llm_fed.runs import secrecy
from llm_fed.runs.reading import read_config
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile

N = 400_000


def test_the_numbers_are_those_of_aes_in_counter_mode():
    """The first block of AES-256 under the key of the purpose, by its definition: the cipher of 16 zero bytes."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    secret = toy.secret(7)
    block = Cipher(algorithms.AES(bytes.fromhex(secret.of("a", 1).key)), modes.ECB()).encryptor().update(bytes(16))
    words = [int.from_bytes(block[:8], "little"), int.from_bytes(block[8:], "little")]
    assert secret.uniforms(3, "a", 1)[:2].tolist() == [((word & (2**53 - 1)) + 1) / 2**53 for word in words]


def test_uniform_and_normal():
    """Kolmogorov and Smirnov, and four moments within five standard errors; tails as long as they should be."""
    uniforms, normals = toy.secret(1).uniforms(N, "u"), toy.secret(1).gaussians(N + 1, "n")
    assert float(uniforms.min()) > 0 and float(uniforms.max()) <= 1
    assert stats.kstest(uniforms.numpy(), "uniform").pvalue > 1e-3 < stats.kstest(normals.numpy(), "norm").pvalue
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((normals**power).mean()) - moment) < 5 * math.sqrt(variance / N)
    tail = 2 * stats.norm.sf(3.5)
    assert abs(float((normals.abs() > 3.5).double().sum()) - N * tail) < 5 * math.sqrt(N * tail)
    halves = normals[:N].view(2, -1)  # both numbers of each pair
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 5 / math.sqrt(N / 2)
    assert len(toy.secret(1).gaussians(0)) == 0 and len(toy.secret(1).gaussians(1)) == 1


@pytest.mark.parametrize("other", [2**32, 2**63, 2**255])
def test_keys_with_equal_low_bits_give_unlike_numbers(other):
    one, two = (toy.secret(number).gaussians(10_000, "noise", 1) for number in (5, 5 + other))
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.05
    assert torch.equal(one, toy.secret(5).gaussians(10_000, "noise", 1))
    for parts in (("noise", 2), ("noise", "1"), ("nois", "e", 1), ()):
        assert not torch.equal(one[:10], toy.secret(5).gaussians(10, *parts))


def test_a_secret_is_not_shown():
    secret = Secret.fresh()
    assert secret.key not in repr(secret) + str(secret) + secret.mark and len(secret.key) == 64
    assert Secret.fresh() != secret


def settings_of(small, path, **changes):
    tree = {
        "rounds": 3, "participation": 0.9, "eval": {"every": 1}, "method": {"name": "fedit"},
        "checkpoint": {"every": 1}, "privacy": {"clip": 0.5, "noise": 4.0},
    }  # fmt: skip
    return configfile.load(small.config(path, **{**tree, **changes}))


KINDS = {
    "server": {"privacy": {"clip": 0.5, "noise": 4.0}},
    "client": {"privacy": {"clip": 0.5, "noise": 4.0, "where": "client"}},
    "example": {"privacy": {"clip": 0.5, "noise": 4.0, "unit": "example"}},
}


@pytest.fixture(scope="module", params=KINDS)
def made(small, tmp_path_factory, request):
    """A finished run, and its configuration."""
    folder = tmp_path_factory.mktemp(request.param)
    config = settings_of(small, folder / "small.yaml", **KINDS[request.param])
    run.train(config, folder / "run", reporter=equal_runs.quiet())
    return config, folder / "run"


def held(folder: Path) -> dict[str, bytes]:
    """What a run has handed out, but for times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in [folder / "metrics.jsonl", *folder.glob("adapters/*/*.safetensors")]
    }


def test_one_file_that_only_its_owner_may_read_holds_it(made):
    _, folder = made
    (secret := folder / secrecy.FILE).stat()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    key = secret.read_text().strip()
    forms = [key.encode(), key.upper().encode(), bytes.fromhex(key), bytes.fromhex(key)[::-1]]
    others = [path for path in folder.rglob("*") if path.is_file() and path != secret]
    assert len(others) > 10
    for path in others:
        data = path.read_bytes()
        assert not any(form in data for form in forms), path
    assert json.loads((folder / "environment.json").read_text())["secret"] == Secret(key).mark


def forms(key: str) -> list[bytes]:
    """How 256 bits may be written: raw, hexadecimal, in base 64 and 32, as a number and as bytes; also backwards."""
    found = []
    for raw in (bytes.fromhex(key), bytes.fromhex(key)[::-1]):
        found += [raw, raw.hex().encode(), raw.hex().upper().encode(), str(int.from_bytes(raw)).encode()]
        for skip in range(3):  # within a longer text, of which the ends depend on what stands around
            code = base64.b64encode(bytes(skip) + raw)[4:-4]
            found += [code, code.translate(bytes.maketrans(b"+/", b"-_"))]
        found += [base64.b32encode(raw).rstrip(b"="), str([*raw]).strip("[]").encode()]
    return found


class Overheard(NetworkInProcess):
    """Its messages, in both directions."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.heard: list[bytes] = []

    def _carry_out(self, node, message, content):
        id = super()._carry_out(node, message, content)
        reply = self._replies[id]
        self.heard += [json.dumps(message).encode(), content, json.dumps(reply.content).encode(), reply.answer]
        return id


class Told:
    """A tracker, which gets what W&B and MLflow get."""

    name, told = "aim", list[bytes]()

    def __init__(self, log_with, project_dir):
        self.trackers, self.tracker = [self], self

    def log(self, values, *_, **more):
        self.told.append(repr(values).encode())

    def init_trackers(self, project, init_kwargs):
        self.log(init_kwargs)

    store_init_configuration = log

    def finish(self):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_leaves_a_private_run_holds_a_secret(small, tmp_path, monkeypatch, llm_fed, kind):
    """Of no secret that is drawn, nor of one that is derived for a purpose: messages of a network and what its server
    and nodes keep, a run's other files, its tracker, an export, a push, and all that is printed."""
    keys, real = set[str](), Secret.__init__
    monkeypatch.setattr(Secret, "__init__", lambda self, key: (keys.add(key), real(self, key))[1])
    monkeypatch.setattr("llm_fed.runs.trackers.Accelerator", Told)
    monkeypatch.setattr("llm_fed.bench.build.check_trackers", lambda track: None)
    small_run = small.tree(rounds=2, method={"name": "fedit"}, **KINDS[kind])
    link = Overheard(tmp_path, small, small_run | {"network": {"clients": sorted(CLIENTS)}})
    said = io.StringIO()
    server.train(link.config, tmp_path / "there", link, reporter=Reporter(Console(file=said)))
    of_network = len(keys)
    (tmp_path / "small.yaml").write_text(documents.dump(small_run | {"track": {"with": ["aim"]}}))
    with connected(monkeypatch, tmp_path) as hub:
        words = [
            ["run", tmp_path / "small.yaml", "--out", tmp_path / "run"], ["push", tmp_path / "run", "ann"],
            ["export", tmp_path / "run", tmp_path / "copies"], ["eval", tmp_path / "run"], ["audit", tmp_path / "run"],
        ]  # fmt: skip
        outcomes = [llm_fed(*each) for each in words]
        pushed = [data for repository in hub.repositories.values() for data in repository.files.values()]
    assert [outcome.code for outcome in outcomes] == [0] * 5, outcomes
    printed = [said.getvalue(), *(outcome.out + outcome.err for outcome in outcomes)]
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != secrecy.FILE]
    everything = b"\n".join([*link.heard, *Told.told, *pushed, *kept, *(text.encode() for text in printed)])
    assert len(link.heard) > 40 and Told.told and len(pushed) > 5 and 2 < of_network < len(keys)
    assert not [form for key in keys for form in forms(key) if form in everything]


def test_continued_with_the_file_it_is_uninterrupted_and_without_it_refused(made, tmp_path):
    config, folder = made
    (tmp_path / "cut").mkdir()
    secret = tmp_path / "cut" / secrecy.FILE
    secret.write_bytes((folder / secrecy.FILE).read_bytes())  # which lies there already
    with pytest.raises(KeyboardInterrupt):
        run.train(config, tmp_path / "cut", reporter=StopsAfter(2))
    kept = secret.read_text()
    for data, word in ((None, "is not there"), (toy.secret(3).key, "of another run"), ("spoilt", "is damaged")):
        secret.unlink() if data is None else secret.write_text(data)
        with pytest.raises(RunError, match=word):
            run.train(config, tmp_path / "cut", reporter=equal_runs.quiet())
    secret.write_text(kept)
    run.train(config, tmp_path / "cut", reporter=equal_runs.quiet())
    assert held(tmp_path / "cut") == held(folder)


def test_noise_that_was_drawn_meets_nothing_else(small, tmp_path):
    """Neither other rows nor another learning rate; with a new secret both may change."""
    data = shutil.copytree(small.data, tmp_path / "data")
    made = {"task": {"path": str(data)}, "participation": 1.0, "checkpoint": {"every": 2}}
    config, longer = (settings_of(small, tmp_path / f"{n}.yaml", rounds=n, **made) for n in (4, 6))
    with pytest.raises(KeyboardInterrupt):
        run.train(config, tmp_path / "run", reporter=StopsAfter(3))
    with pytest.raises(UserError, match=r"rounds=6 changes the learning rate of round 3.* shows what it hides"):
        run.train(longer, tmp_path / "run", reporter=equal_runs.quiet())
    rows = data / "ada/train.jsonl"
    rows.write_text(rows.read_text().replace("w20 w21", "w30 w31"))
    with pytest.raises(UserError, match=r"the data have changed \(1 row .* shows what it hides"):
        run.train(config, tmp_path / "run", reporter=equal_runs.quiet())
    (tmp_path / "run/splits.json").unlink()
    with pytest.raises(UserError, match=r"the data have changed \(splits.json is gone\), but"):
        run.train(config, tmp_path / "run", reporter=equal_runs.quiet())
    run.train(config, tmp_path / "run", reporter=equal_runs.quiet(), fresh=True)
    assert (tmp_path / "run/summary.json").exists()


def test_a_run_that_starts_again_draws_another_secret(small, tmp_path):
    config = settings_of(small, tmp_path / "small.yaml", rounds=1)
    toy.plant(tmp_path / "run", 9)
    run.train(config, tmp_path / "run", reporter=equal_runs.quiet(), fresh=True)
    assert secrecy.read(tmp_path / "run") == toy.secret(9)  # no run was there
    before = held(tmp_path / "run")
    run.train(config, tmp_path / "run", reporter=equal_runs.quiet(), fresh=True)
    assert secrecy.read(tmp_path / "run") not in (None, toy.secret(9)) and held(tmp_path / "run") != before


def test_two_runs_of_one_seed_have_unlike_noise(tmp_path):
    config = toy.config(rounds=1, privacy={"clip": 1e-6, "noise": 1e6})
    one, two = (go(tmp_path / name, rounds=1, config=config)[0].state.row for name in "ab")
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 1 - 1e-6  # of the same noise it is 1


def test_the_cohorts_come_from_the_file(tmp_path):
    config = toy.config(rounds=4, participation=0.5, privacy={"clip": 1.0, "noise": 1.0})
    toy.plant(tmp_path / "run", 4)
    schedule = Poisson(tuple(TARGETS), 0.5, toy.secret(4))
    *_, lines = go(tmp_path / "run", config=config, schedule=schedule)
    assert [line["asked"] for line in lines if line["kind"] == "round"] == [len(schedule.asks(n)) for n in (1, 2, 3, 4)]


def test_an_audit_without_it_verifies_no_training(made, tmp_path):
    _, folder = made
    secret = folder / secrecy.FILE
    kept = secret.read_bytes()
    whole = audit(folder, every=True)
    assert not whole.findings and any("trained again" in line for line in whole.checked)
    try:
        for data, word in (
            (None, "is not there"),
            (toy.secret(3).key.encode(), "of another run"),
            (b"\xff damaged", "cannot be read"),
            (b"damaged", "is damaged"),
        ):
            secret.unlink() if data is None else secret.write_bytes(data)
            found = audit(folder, every=True)
            assert not found.findings and any(word in line for line in found.unchecked)
            assert not any("trained again" in line for line in found.checked)
    finally:
        secret.write_bytes(kept)
        secret.chmod(0o600)


def test_a_finished_run_is_read_without_it(small, tmp_path):
    config = settings_of(small, tmp_path / "small.yaml", rounds=1)
    run.train(config, tmp_path / "run", reporter=equal_runs.quiet())
    (tmp_path / "run" / secrecy.FILE).unlink()
    assert read_config(tmp_path / "run").privacy.clip == 0.5
    assert run.train(config, tmp_path / "run", reporter=equal_runs.quiet())["round"] == 1  # it is complete
    run.train(config, tmp_path / "run", reporter=equal_runs.quiet(), fresh=True)
    assert read_config(tmp_path / "run").privacy.clip == 0.5
