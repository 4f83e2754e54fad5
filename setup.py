"""What pyproject.toml cannot say: an editable install is asked for llm_fed before sys.path is.

A clone is a folder named llm_fed. To a program that is started in the folder above it, the clone looks like a namespace
package llm_fed, which Python takes before it asks the finder of the editable install. So the finder comes first.
"""

import base64
import hashlib
import re
import warnings
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

FINDER = re.compile(r"import (\w+); \1\.install\(\)")  # the line that setuptools puts into a .pth file
FIRST = (
    'import sys, {0}; {0}.install(); sys.meta_path.sort(key=lambda finder: getattr(finder, "__module__", "") != "{0}")'
)


class FirstFound(editable_wheel):
    """Makes the wheel of an editable install as setuptools does, with another line in its .pth file."""

    def run(self) -> None:
        super().run()
        for wheel in Path(self.dist_dir).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
            (pth,) = (name for name in files if name.endswith(".pth"))
            (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
            line, changed = FINDER.subn(lambda found: FIRST.format(found[1]), files[pth].decode())
            if changed != 1:  # the install works all the same, but from the folder above the clone
                warnings.warn(f"setuptools writes {line!r} into {pth}, which FINDER does not know", stacklevel=1)
                continue
            files[pth] = line.encode()
            files[record] = _recorded(files[record].decode(), pth, files[pth]).encode()
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, data in files.items():
                    archive.writestr(name, data)


def _recorded(record: str, name: str, data: bytes) -> str:
    """The wheel's list of files with the hash and the size of this one as they are now."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    rows = (f"{name},sha256={digest},{len(data)}" if row.startswith(f"{name},") else row for row in record.split("\n"))
    return "\n".join(rows)


setup(cmdclass={"editable_wheel": FirstFound})
