"""Lists others' images that are not named by digest, and pins them: somebody may push a different image under a tag.

    python tools/images.py            prints a line for each that is not pinned, and does not fail
    python tools/images.py --pin      pulls each tag, and appends its current digest (needs docker and a registry)

They are named in deploy/Dockerfile and docker-compose.yml: NAME:TAG, or NAME:TAG@sha256:DIGEST after they are pinned.
The digest is that of the list for all kinds of machines.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("deploy/Dockerfile", "docker-compose.yml")
NAMED = re.compile(r"(?<=_IMAGE:-)[^}]+(?=\})|(?<=^ARG BASE_IMAGE=)\S+", re.MULTILINE)
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


def main(arguments: Sequence[str]) -> int:
    if list(arguments) not in ([], ["--pin"]):
        print(__doc__, file=sys.stderr)
        return 2
    texts = {file: (ROOT / file).read_text() for file in FILES}
    if arguments:
        images = {image for text in texts.values() for image in images_in(text)}
        try:
            digests = {image: pulled(DIGEST.sub("", image)) for image in sorted(images)}
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            print(f"images: nothing was pinned: {error}", file=sys.stderr)
            return 1
        texts = {file: pinned(text, digests) for file, text in texts.items()}
        for file, text in texts.items():
            (ROOT / file).write_text(text)
    for image in sorted({image for text in texts.values() for image in images_in(text) if not DIGEST.search(image)}):
        print(f"  NOT PINNED: {image} is a tag, and not a digest: `make pin-images`, where a registry can be reached.")
    return 0


def images_in(text: str) -> list[str]:
    """The images of others that a file names."""
    return NAMED.findall(text)


def pinned(text: str, digests: Mapping[str, str]) -> str:
    """The text with each image in `digests` replaced by its `NAME:TAG@sha256:...`."""
    return NAMED.sub(lambda found: digests.get(found[0], found[0]), text)


def pulled(image: str) -> str:
    """`NAME:TAG@sha256:...` as a registry has it now. Raises CalledProcessError, ValueError, or OSError (no docker)."""
    subprocess.run(["docker", "pull", "--quiet", image], check=True, stdout=subprocess.DEVNULL)
    command = ["docker", "image", "inspect", "--format", '{{join .RepoDigests "\\n"}}', image]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    name = image.rpartition(":")[0]
    digest = next((each.removeprefix(name) for each in listed if each.startswith(f"{name}@")), "")
    if not DIGEST.match(digest):
        raise ValueError(f"{image} has no digest of a registry: {listed}")
    return image + digest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
