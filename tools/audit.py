"""Checks whether a package in requirements/ has a known vulnerability, by pip-audit with the advisories of osv.dev.

`make audit` runs it, and so does `make check`. If the service cannot be reached, it prints NOT CHECKED and succeeds. If
it finds a vulnerability, it fails: `make lock LOCK="--upgrade-package NAME"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
SETS = (("torch", "run", "cuda", "dev"), ("proto",), ("tools",), ("wheels",), ("docs",), ("kubectl",))
"""Files that are checked together. The packages in build.txt are in dev.txt as well."""
UNREACHABLE = ("requests.exceptions.", "_service.interface.")
"""pip-audit 2.10 ends with these exceptions if the service does not answer, or answers with a failure."""


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: audit.py PIP-AUDIT", file=sys.stderr)
        return 2
    options = ["--vulnerability-service", "osv", "--disable-pip", "--require-hashes", "--format", "json"]
    command = [arguments[0], *options, "--progress-spinner", "off", "--timeout", "10"]
    worst = 0
    for parts in SETS:
        files = [option for part in parts for option in ("--requirement", str(FOLDER / f"{part}.txt"))]
        ended = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        code, words = verdict(" + ".join(parts), ended.stdout, ended.stderr)
        print(words, file=sys.stderr)
        worst = max(worst, code)
        if not ended.stdout.strip():
            break  # the other files would fail in the same way
    return worst


def verdict(what: str, stdout: str, stderr: str) -> tuple[int, str]:
    """The exit code, and what to print about pip-audit's output. The output is JSON if the audit was completed."""
    if not stdout.strip():
        (why,) = stderr.strip().splitlines()[-1:] or ["it said nothing"]
        if any(word in stderr for word in UNREACHABLE):
            return 0, f"\n  NOT CHECKED for vulnerabilities: the service with advisories does not answer.\n  {why}\n"
        return 2, f"audit: pip-audit failed: {why}"
    packages = json.loads(stdout)["dependencies"]
    found = [
        f"audit: {package['name']} {package['version']}: {each['id']}, fixed in "
        f"{', '.join(each['fix_versions']) or 'no version yet'}"
        for package in packages
        for each in package.get("vulns", [])
    ]
    skipped = [
        f"audit: {each['name']} was not looked at: {each['skip_reason']}" for each in packages if "skip_reason" in each
    ]
    summary = f"audit: {what}: {len(packages)} packages, {len(found)} known vulnerabilities"
    return int(bool(found)), "\n".join([*found, *skipped, summary])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
