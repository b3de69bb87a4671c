"""Writes bills of materials (CycloneDX 1.6, JSON): the packages that the wheel is locked to, or that are in an image.

    python tools/sbom.py wheel dist/decoupled_diloco-0.1.0-py3-none-any.whl
    python tools/sbom.py image decoupled-diloco/server:dev        needs the image, and docker
    python tools/sbom.py here NAME VERSION                        of the machine that it runs on

It prints to standard output; `make sbom` writes files. For an image, this file runs inside it with the image's Python.
So it lists what is really there, including Debian's packages. It needs only Python's standard library.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

PARTS = ("torch", "run", "cuda")
"""Files of requirements/ with the wheel's dependencies. The last one counts only with the CUDA build of torch."""
DPKG = Path("/var/lib/dpkg/status")
Component = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case ["wheel", wheel]:
            print(bill(*of_wheel(Path(wheel), Path(__file__).resolve().parent.parent)))
        case ["here", name, version]:
            print(bill(component("container", name, version), [*of_python(), *of_debian(DPKG)]))
        case ["image", image]:
            return of_image(image)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def bill(subject: Component, parts: Iterable[Component]) -> str:
    """The document. The same parts give the same bytes, as it contains no time and no random number."""
    parts = sorted(parts, key=lambda part: str(part["bom-ref"]))
    body: dict[str, Any] = {
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "tools/sbom.py of decoupled-diloco"}]},
            "component": subject,
        },
        "components": parts,
        "dependencies": [{"ref": subject["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return json.dumps({**head, **body}, indent=2)


def component(kind: str, name: str, version: str, purl: str | None = None, **more: Any) -> Component:
    found = {"type": kind, "bom-ref": purl or f"{name}@{version}", "name": name, "version": version, **more}
    return {**found, "purl": purl} if purl else found


def of_wheel(wheel: Path, root: Path) -> tuple[Component, list[Component]]:
    """Our wheel, and every package that it is locked to, with the hashes of its acceptable wheels."""
    name, version = wheel.name.split("-")[:2]
    subject = component(
        "library", name, version, pypi(name, version),
        hashes=[sha256(hashlib.sha256(wheel.read_bytes()).hexdigest())], licenses=[{"license": {"id": "Apache-2.0"}}],
    )  # fmt: skip
    parts = []
    for part in PARTS:
        text = (root / "requirements" / f"{part}.txt").read_text()
        for found in re.finditer(r"^([\w.-]+)==([^\s\\]+)((?:[\s\\]+--hash=\S+)+)", text, re.MULTILINE):
            name, version, hashes = found.groups()
            listed = [sha256(digest) for digest in re.findall("sha256:([0-9a-f]{64})", hashes)]
            scope = "optional" if part == "cuda" else "required"
            parts.append(component("library", name, version, pypi(name, version), scope=scope, hashes=listed))
    return subject, parts


def of_python() -> list[Component]:
    """This Python, and every distribution that it finds."""
    python = platform.python_version()
    found = {"python": component("platform", "python", python, f"pkg:generic/python@{python}")}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        found[pypi(name, version)] = component("library", name, version, pypi(name, version), **licence(distribution))
    return list(found.values())


def licence(distribution: metadata.Distribution) -> dict[str, Any]:
    """The license that the distribution states, if it does so in one line or as an SPDX expression."""
    expression = distribution.metadata["License-Expression"]
    if expression:
        return {"licenses": [{"expression": expression}]}
    words = (distribution.metadata["License"] or "").strip()
    return {"licenses": [{"license": {"name": words}}]} if words and "\n" not in words else {}


def of_debian(status: Path) -> list[Component]:
    """The packages that Debian's package manager has installed. None if the file `status` does not exist."""
    if not status.exists():
        return []
    found = []
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version, machine = (fields[key] for key in ("Package", "Version", "Architecture"))
            purl = f"pkg:deb/debian/{name}@{quote(version, safe='')}?arch={machine}"
            found.append(component("library", name, version, purl))
    return found


def of_image(image: str) -> int:
    """Run this file in the image. Returns the exit code of docker."""
    asked = subprocess.run(["docker", "image", "inspect", "--format", "{{.Id}}", image], capture_output=True, text=True)
    if asked.returncode:
        print(f"sbom: {image}: {asked.stderr.strip()}", file=sys.stderr)
        return asked.returncode
    command = ["docker", "run", "--rm", "--interactive", "--network", "none", "--entrypoint", "python", image]
    with Path(__file__).open() as this:
        return subprocess.run([*command, "-", "here", image, asked.stdout.strip()], stdin=this, check=False).returncode


def pypi(name: str, version: str) -> str:
    return f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{quote(version, safe='')}"


def sha256(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
