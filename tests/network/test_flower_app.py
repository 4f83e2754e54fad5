"""What `llm-fed flower` writes is what Flower takes, by its name and by that of its folder; else it is refused."""

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from network import NetworkInProcess, tree

from llm_fed.basics.errors import UserError
from llm_fed.network import flower_app, limits, server
from llm_fed.settings import configfile, shipped

valid_name = pytest.importorskip("flwr.supercore.utils").is_valid_name
NAMES = st.text(max_size=50) | st.text(string.ascii_letters + string.digits + "-_. ", max_size=50)


@settings(max_examples=150, deadline=None)
@given(NAMES)
@example("a" * 32)
@example("a" * 33)
@example("a\n")
def test_the_rule_is_flowers(name):
    assert flower_app.accepts(name) == valid_name(name)[0]


@settings(max_examples=150, deadline=None)
@given(NAMES, NAMES)
@example("", "")
@example("🏥", "_")
@example("2024_" + "x" * 40, "my_module:" + "Y" * 40)
def test_flower_takes_the_name_of_any_file_and_method(stem, method):
    name = flower_app.name_of(stem, method)
    assert valid_name(name) == (True, "") and flower_app.name_of(name) == name
    assert len({flower_app.name_of(stem, "x" * 30 + end) for end in "ab"}) == 2


@pytest.mark.parametrize("name", [name for name in shipped.files() if name.startswith("flowertune")])
def test_the_shipped_files_of_flowers_leaderboard_become_apps(here, llm_fed, name):
    from flwr.cli.build import build_fab_from_disk

    said = llm_fed("flower", name)
    assert said.code == 0 and "(task.partition is left out: it divides one data set in a simulation" in said.out
    app = here / "apps" / flower_app.name_of(name.removesuffix(".yaml"), "fedit")
    assert build_fab_from_disk(app)
    limits.check(configfile.load(app / "federation/config.yaml"))  # as the server and every node do


@pytest.mark.parametrize("folder", ["my_app", "x" * 33, "7", "an app", "-"])
def test_a_folder_that_flower_would_refuse_is_not_written(small, here, llm_fed, folder):
    config = small.config(here / "clinics.yaml")
    said = llm_fed("flower", config, "--out", f"apps/{folder}")
    said.assert_refused("Flower takes letters, digits and hyphens, 32 at most", "give --out apps/")
    assert not (here / "apps").exists()
    better = said.err.split("give --out ")[1].strip()
    assert "It replaces an app" not in llm_fed("flower", config, "--out", better).out
    assert "It replaces an app of another" in llm_fed("flower", config, "rounds=7", "--out", better).out


def test_the_name_of_a_linked_folder_is_that_of_its_target_as_flower_resolves_it(small, here, llm_fed):
    (here / "my_app").mkdir()
    (here / "app").symlink_to(here / "my_app")
    llm_fed("flower", small.config(here / "clinics.yaml"), "--out", "app").assert_refused("would refuse 'my_app'")


def test_what_a_network_cannot_do_is_refused_where_the_app_is_written(small, here, llm_fed):
    config = small.config(here / "clinics.yaml", adapter={"start": "earlier"})
    llm_fed("flower", config).assert_refused("adapter.start: over a network")
    assert not (here / "apps").exists()


@pytest.mark.usefixtures("quick")
def test_a_run_folder_whose_name_nodes_would_refuse_ends_the_run_before_it_begins(small, tmp_path):
    link = NetworkInProcess(tmp_path, small, tree(small))
    with pytest.raises(UserError, match="is named 'my run', which nodes refuse"):
        server.train(link.config, tmp_path / "my run", link)
    assert not link.orders
    link = NetworkInProcess(tmp_path, small, tree(small, export={"clients": "none"}))
    assert "unfinished" not in server.train(link.config, tmp_path / "my run", link)  # nodes write no folder
