"""Push the personal adapters of a finished run to the Hub; takes the words of `llm-fed push`.

python scripts/push.py RUN_DIR NAMESPACE [--client ...] [--private] [--license ...] [--prefix ...] [--one-repository]
"""

from __future__ import annotations

import sys

from llm_fed.cli import main

if __name__ == "__main__":
    main(["push", *sys.argv[1:]])
