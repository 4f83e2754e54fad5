"""`python -m llm_fed.cli`, for `accelerate launch --module llm_fed.cli`."""

import os

from llm_fed.cli import main

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
