"""Train a federation under `accelerate launch`; takes the words of `llm-fed run`.

accelerate launch --config_file accelerate_config.yaml scripts/train.py CONFIG.yaml key=value ... [--out DIR] [--fresh]

With several processes (scripts/launch/) the cohort is spread over them.
"""

from __future__ import annotations

import sys

from llm_fed.cli import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
