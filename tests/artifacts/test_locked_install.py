"""tools/install.py with pip itself, on indexes that are made here: only what is listed, by its hash, gets in."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/install.py"


def make_wheel(folder: Path, name: str, version: str, *requires: str, body: str = "") -> Path:
    """A wheel with one module, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", body)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def digest(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


class Place:
    """A repository with this tool and these requirements, two indexes, and an environment to fill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tools").mkdir()
        shutil.copy(TOOL, folder / "tools")
        (folder / "requirements").mkdir()
        self.environment = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.environment], check=True)

    def publish(self, index: str, name: str, version: str, *requires: str, body: str = "") -> Path:
        """Put a wheel into an index. As in PyTorch's, the page does not have to name its hash."""
        wheel = make_wheel(self.folder / index / name.replace("_", "-"), name, version, *requires, body=body)
        page = wheel.with_name("index.html")
        links = "".join(f'<a href="{found.name}">{found.name}</a>\n' for found in wheel.parent.glob("*.whl"))
        page.write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
        return wheel

    def lock(self, part: str, **pinned: tuple[str, Path]) -> None:
        lines = [f"{name}=={version} --hash=sha256:{digest(wheel)}" for name, (version, wheel) in pinned.items()]
        (self.folder / "requirements" / f"{part}.txt").write_text("\n".join(lines) + "\n")

    def install(self, *parts: str, torch_index: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        given = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": (self.folder / "usual").as_uri(),
            "TORCH_INDEX": (self.folder / torch_index).as_uri() if torch_index else "",
        }
        command = [sys.executable, self.folder / "tools/install.py", "--python", self.environment, *parts]
        return subprocess.run(
            command, env={**own, **given, **variables}, capture_output=True, text=True, check=False, timeout=200
        )

    @property
    def installed(self) -> Mapping[str, str]:
        """name -> version."""
        names = (path.stem.partition("-")[::2] for path in self.environment.glob("lib/*/site-packages/*.dist-info"))
        return dict(names)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """torch in two builds, the one for CUDA in the usual index; what it loads; and one package besides."""
    place = Place(tmp_path)
    cuda = place.publish("usual", "torch", "2.0", "nvidia-blas")
    place.lock("torch", torch=("2.0", cuda))
    place.lock("cuda", nvidia_blas=("1", place.publish("usual", "nvidia_blas", "1")))
    place.lock("run", plain=("1", place.publish("usual", "plain", "1")))
    return place


def test_what_is_listed_is_installed_and_the_build_for_cuda_gets_its_libraries(place: Place) -> None:
    ended = place.install("torch", "run")
    assert ended.returncode == 0, ended.stderr
    assert place.installed == {"torch": "2.0", "nvidia_blas": "1", "plain": "1"}


def test_a_wheel_that_was_exchanged_is_refused(place: Place) -> None:
    place.publish("usual", "plain", "1", body="import os  # and takes the token away")
    ended = place.install("run")
    assert ended.returncode != 0
    assert "DO NOT MATCH THE HASHES" in ended.stderr
    assert place.installed == {}


@pytest.mark.gate
def test_in_the_index_of_torch_nothing_but_torch_is_looked_for(place: Place) -> None:
    """Not even what would have the right hash, nor what torch itself says that it needs."""
    built = place.publish("of-torch", "torch", "2.0", "helper")
    place.publish("of-torch", "helper", "9")
    only_there = place.publish("of-torch", "plain", "2")
    place.lock("torch", torch=("2.0", built))
    place.lock("run", plain=("2", only_there))
    ended = place.install("torch", "run", torch_index="of-torch")
    assert ended.returncode != 0
    assert "No matching distribution found for plain==2" in ended.stderr
    assert place.installed == {"torch": "2.0"}


def test_what_other_indexes_are_set_does_not_matter_for_torch(place: Place) -> None:
    place.publish("evil", "torch", "2.0+zzz", body="import os")
    place.lock("torch", torch=("2.0", place.publish("of-torch", "torch", "2.0")))
    ended = place.install("torch", torch_index="of-torch", PIP_EXTRA_INDEX_URL=(place.folder / "evil").as_uri())
    assert ended.returncode == 0, ended.stderr
    assert place.installed == {"torch": "2.0"}
