"""Metrics of the library evaluate, from local scripts as they lie on the Hub: scaled where they say 0 to 1, refused
where less is better."""

import sys
from pathlib import Path

import pytest

from llm_fed.basics.errors import UserError
from llm_fed.scoring import own_metric, scores
from llm_fed.settings import plugins

SCRIPT = '''
import datasets
import evaluate

class Own(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="""{said}""", citation="",
            features=datasets.Features({{name: datasets.{feature} for name in ("predictions", "references")}}),
        )

    def _compute(self, predictions, references):
        right = sum(said == wanted for said, wanted in zip(predictions, references)) / len(references)
        return {returned}
'''
TEXT, ONE = 'Value("string")', "Minimum possible value is 0. Maximum possible value is 1.0."
# What its description says, what it returns, and the score of one right answer of two.
METRICS = {
    "share": (ONE, '{"share": right}', "", 50.0),
    "percent": ("A score from 0 to 100.", '{"percent": 100 * right}', "", 50.0),
    "several": (ONE, '{"first": right, "second": right / 2}', ":second", 25.0),
}


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """Where the library copies scripts; what other tests have loaded from another place is out of sight meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluate.config.HF_MODULES_CACHE", tmp_path_factory.mktemp("modules"))
        patch.setattr(sys, "path", [path for path in sys.path if not Path(path, "evaluate_modules").exists()])
        before = {name: sys.modules.pop(name) for name in _loaded()}
        yield
        for name in _loaded():
            del sys.modules[name]
        sys.modules |= before


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]


def written(folder: Path, name: str, said: str, returned: str, feature: str = TEXT) -> str:
    (folder / name).mkdir()
    text = SCRIPT.format(said=said, returned=returned, feature=feature)
    (folder / name / f"{name}.py").write_text(text)
    return f"evaluate:{folder / name}"


@pytest.mark.parametrize("name", METRICS)
def test_a_local_metric_scores_0_to_100(name, tmp_path):
    said, returned, key, score = METRICS[name]
    asked = written(tmp_path, name, said, returned) + key
    metric = scores.find(asked)
    assert own_metric.compute(asked, metric.outside, ["a", "b"], [["a"], ["c"]]) == score


@pytest.mark.parametrize(
    "said, returned, feature, message",
    [
        ("The lower the value, the better the performance.", '{"own": right}', TEXT, "less is better"),
        (ONE, '{"first": right, "second": 1}', TEXT, "returned a dict with first, second"),
        (ONE, '{"own": right}', 'Value("int32")', "fails on answers such as 'a'"),
        ("A score.", '{"own": 300 * right}', TEXT, "must return numbers from 0 to 100"),
        (ONE, "nowhere", TEXT, "nowhere"),
    ],
)
def test_what_is_no_score_is_refused(said, returned, feature, message, tmp_path):
    asked = written(tmp_path, "own", said, returned, feature)
    with pytest.raises((UserError, NameError), match=message):
        own_metric.compute(asked, scores.find(asked).outside, ["a", "b"], [["a"], ["c"]])


def test_one_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="eval.metric=evaluate:.*nowhere: the library evaluate cannot load it"):
        scores.find(f"evaluate:{tmp_path / 'nowhere'}")


def test_a_folder_of_somebody_else_runs_no_script(tmp_path):
    asked = written(tmp_path, "own", ONE, '{"own": right}')
    with pytest.raises(plugins.NotAllowed, match="--allow evaluate:"):
        plugins.check_folder(tmp_path / "config.yaml", {"eval": {"metric": asked}})
    with plugins.only(()), pytest.raises(plugins.NotAllowed):
        scores.find(asked)
    with plugins.only((asked,)):
        assert scores.find(asked).outside.scale == 100
