"""lm-evaluation-harness on the personal models of a run: `LM` for `lm_eval.simple_evaluate`, and its command line.

    python -m llm_fed.harness run --model llm_fed --model_args run=runs/mine,client=north --tasks hellaswag

takes what `lm_eval` takes; that one only finds models in a table of its own. Without `client` it is the base.
"""

from importlib import import_module
from typing import Any

_HOME = "llm_fed.commands.harness"
_NAMES = ("LM", "Models")


def __getattr__(name: str) -> Any:
    if name in _NAMES:  # imports torch and lm_eval
        return getattr(import_module(_HOME), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    import_module(_HOME).main()
