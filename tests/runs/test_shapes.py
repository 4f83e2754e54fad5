"""What runs write is taken as it is; tests/end_to_end/test_damage.py has what is refused."""

import pytest

from llm_fed.runs import shapes

NAN = float("nan")


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("metrics.jsonl", {"kind": "merge", "client": "ada", "rounds": {"fedit": 3, "local": None}, "lambda_fed": 0.3}),
        ("metrics.jsonl", {"kind": "merge", "client": "ada", "rounds": {}, "lambda_fed": {"lora_A": 0.3, "head": None},
                           "a": float("inf"), "sweep": {"lora_A": {"0.1": 0.2}}, "grid": {"0.0": 1.0, "0.1": NAN}}),
        ("metrics.jsonl", {"kind": "event", "round": 0, "client": "", "event": "x", "reason": "a\nb"}),
        ("metrics.jsonl", {"kind": "privacy", "round": 1, "epsilon": None, "delta": 1e-5, "where": "client"}),
        ("metrics.jsonl", {"kind": "search anew", "round": 2, "changed": ["eval.metric"]}),
        ("metrics.jsonl", {"kind": "score", "round": 2, "split": "test", "unscored": ["ada"]}),
        ("metrics.jsonl", {"kind": "of a later version", "anything": [1]}),
        ("summary.json", {"round": 1, "rounds": 2, "method": "x", "scores": {}, "needs": {"fedit": None}}),
    ],
)  # fmt: skip
def test_what_runs_write_is_taken(file, value):
    shapes.check(file, value)
