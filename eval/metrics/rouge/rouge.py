"""ROUGE-1, ROUGE-2 and ROUGE-L F1 (Lin 2004) as an `evaluate` module on top of the `rouge_score` package."""

import functools

import datasets
import evaluate
from nltk.stem.porter import PorterStemmer
from rouge_score import rouge_scorer, tokenize, tokenizers

TYPES = ("rouge1", "rouge2", "rougeL")


class Tokenizer(tokenizers.Tokenizer):
    """rouge_score's own words and Porter stems, each word stemmed once: stemming takes most of the time."""

    def __init__(self) -> None:
        self.stem = functools.cache(PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        return tokenize.tokenize(text, self)


class Rouge(evaluate.Metric):
    """Mean F1 over the examples, 0-100; Porter stemmer on; each example with its best reference, per type.

    `rouge_score` lowercases and keeps only a-z and 0-9: text in other scripts, punctuation alone, and the
    empty string score 0 even against themselves (use exact_match there).
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="ROUGE-1/2/L F1, stemmed, best over the references of an example, 0-100.",
            citation="Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004.",
            inputs_description="predictions: one text per example; references: a list of texts per example; "
            "rouge_types: which of rouge1, rouge2, rougeL (default: all three, in one pass).",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.Sequence(datasets.Value("string")),
                }
            ),
        )

    def _compute(self, predictions, references, rouge_types=TYPES):
        scorer = rouge_scorer.RougeScorer(list(rouge_types), tokenizer=Tokenizer())
        best = [
            scorer.score_multi(texts, prediction) for prediction, texts in zip(predictions, references, strict=True)
        ]
        return {kind: 100 * sum(example[kind].fmeasure for example in best) / len(best) for kind in rouge_types}
