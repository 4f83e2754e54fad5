"""Makes the pictures of docs/gallery.md anew: runs of the quickstart's size, and what they draw.

The commands below are those of the page, whose `runs` lie in FOLDER; one that has finished is not trained again. The
pictures of reports and tables are taken out of these pages, and Chromium shows how a whole page looks. Some minutes on
one CPU core.

    python scripts/figures/gallery.py FOLDER
"""

from __future__ import annotations

import argparse
import base64
import re
import shlex
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

from llm_fed.basics.errors import RunError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.scripting import plain_errors

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs/images/gallery"
COMMANDS = (
    "llm-fed compare llm_fed/assets/quickstart.yaml base.name=llm_fed/assets/tiny-base rounds=12 eval.every=3 "
    "eval.select=last eval.limit=16 --methods local,fedit,fedmerge --draws 3 --out runs/gallery",
    "llm-fed merge potara --fed runs/gallery/fedit-seed0 --local runs/gallery/local-seed0 method.grid=true "
    "--out runs/merged",
    "llm-fed run llm_fed/assets/quickstart.yaml base.name=llm_fed/assets/tiny-base rounds=12 "
    "'method={name: feddle}' task.server.examples=32 --out runs/feddle",
    "python scripts/figures/clients.py runs/gallery/fedmerge-seed0 runs/gallery/local-seed0",
    "python scripts/figures/weights.py runs/gallery/fedmerge-seed0 --rounds 1,3,6,12",
)
FIGURES = {  # by file: the page that has it, and its title there
    "score_by_round": ("gallery/fedmerge-seed0/report.html", "Score by round"),
    "losses": ("gallery/fedmerge-seed0/report.html", "Training and validation loss by round"),
    "updates": ("gallery/fedmerge-seed0/report.html", "Updates of the clients by round"),
    "bytes": ("gallery/fedmerge-seed0/report.html", "Bytes by round"),
    "weights": ("gallery/fedmerge-seed0/report.html", "Merging weights of round 12"),
    "coefficients": ("feddle/report.html", "Merging coefficients by round"),
    "methods_by_client": ("gallery/table.html", "Score by client"),
    "methods_by_round": ("gallery/table.html", "Score by round"),
    "methods_by_bytes": ("gallery/table.html", "Score by bytes"),
}
FILES = {  # by file: what a command has written
    "verdict": "gallery/verdict.png",
    "mixing": "merged/curves.png",
    "clients": "gallery/fedmerge-seed0/analysis/clients.png",
    "weights_by_round": "gallery/fedmerge-seed0/analysis/weights_by_round.png",
}
SCREENS = {  # by file: the page, and how high a window shows it
    "report": ("gallery/fedmerge-seed0/report.html", 1250),
    "table": ("gallery/table.html", 1300),
}
LARGEST = 60_000  # bytes of a picture
COLOURS = (256, 128, 64, 32)  # of its palette: as many as it can have


def run(command: str, folder: Path) -> None:
    """One of the COMMANDS, with `runs/` as the folder."""
    words = [
        str(folder) + word.removeprefix("runs") if word.startswith("runs/") else word for word in shlex.split(command)
    ]
    program = {"llm-fed": [sys.executable, "-m", "llm_fed.cli"], "python": [sys.executable]}[words[0]]
    print("$", command, flush=True)
    if subprocess.run([*program, *words[1:]], cwd=ROOT).returncode:
        raise RunError(f"failed: {command}")


def figure(page: Path, title: str) -> bytes:
    """The PNG of a report's figure, by its title."""
    for part in re.findall(r"<figure>.*?</figure>", page.read_text(), re.DOTALL):
        if f"<h2>{title}</h2>" in part:
            return base64.b64decode(re.findall(r"base64,([A-Za-z0-9+/=]+)", part)[0])
    raise RunError(f"{page} has no figure {title!r}")


def screen(page: Path, height: int, dark: bool) -> bytes:
    """What Chromium shows of a page in a window of 1100 pixels."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise RunError("no Chromium: install it to take pictures of whole pages")
    picture = page.with_suffix(".png")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", scheme, f"--window-size=1100,{height}"]
    subprocess.run([browser, *options, f"--screenshot={picture}", page.as_uri()], check=True, stderr=subprocess.DEVNULL)
    try:
        return picture.read_bytes()
    finally:
        picture.unlink()


def keep(name: str, data: bytes) -> None:
    """Writes a picture with as many colours as make it small enough."""
    picture = Image.open(BytesIO(data)).convert("RGB")
    for colours in COLOURS:
        written = BytesIO()
        picture.quantize(colours, Image.Quantize.MAXCOVERAGE).save(written, "PNG", optimize=True)
        if written.tell() <= LARGEST:
            break
    (OUT / f"{name}.png").write_bytes(written.getvalue())


def draw(folder: Path) -> None:
    """Every picture, from the runs in the folder."""
    for name, (page, title) in FIGURES.items():
        keep(name, figure(folder / page, title))
    for name, path in FILES.items():
        keep(name, (folder / path).read_bytes())
    for name, (page, height) in SCREENS.items():
        for dark in (False, True):
            keep(name + "_dark" * dark, screen(folder / page, height, dark))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs lie, or are to lie")
    folder = parser.parse_args().folder.resolve()
    with plain_errors(parser):
        folder.mkdir(parents=True, exist_ok=True)
        OUT.mkdir(parents=True, exist_ok=True)
        for command in COMMANDS:
            run(command, folder)
        draw(folder)


if __name__ == "__main__":
    with lasting_streams():
        main()
