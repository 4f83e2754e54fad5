"""What checking a round's uploads costs, against the round: the clients' training and what the server did before.

python scripts/bench/checks.py --clients 1000

Each federation is small (three clients, three steps each), so that training is as short as it can be and the share of
checking as large. Unpacking is not counted as checking: the method needs the message, too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from llm_fed.federation.uploads import flaws
from llm_fed.state.outline import skeleton
from llm_fed.state.roles import Given
from llm_fed.state.wire import pack, unpack
from llm_fed.testing.federation import ADAPTERS, MODELS, go

KINDS = {
    "fedit, adapters": ({"name": "fedit"}, ADAPTERS),
    "fedit, ResNet-9": ({"name": "fedit"}, MODELS),
    "fedproto, ResNet-9": ({"name": "fedproto"}, MODELS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{given.clients} clients, one thread, seconds of processor time\n")
    print("| federation | training | checking | share |\n|---|---|---|---|")
    for name, (settings, setup) in KINDS.items():
        with TemporaryDirectory() as folder:
            whole = go(settings, setup, Path(folder), rounds=1)
            began = time.process_time()
            uploads = whole.uploads()
            training = (time.process_time() - began) / len(uploads) * given.clients
            packed = [pack(upload.content) for upload in uploads]
            likes = [whole.method.upload_like(message) for message in whole.messages().values()]
        contents = [unpack(packed[k % len(packed)]) for k in range(given.clients)]
        expected = [skeleton(likes[0])] * given.clients
        known = [Given.of(likes[k % len(likes)], uploads[k % len(likes)].num_examples) for k in range(given.clients)]
        began = time.process_time()
        reasons = flaws(contents, expected, 10.0, whole.method.sends, known)
        checking = time.process_time() - began
        assert not any(reasons)
        print(f"| {name} | {training:.1f} | {checking:.2f} | {100 * checking / training:.1f} % |")


if __name__ == "__main__":
    main()
