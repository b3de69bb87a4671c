"""docs/deploy.md, followed on real containers: `make e2e-compose`. Prometheus is asked, and never the processes.

One test, because it is one story: what comes later needs the cluster as the earlier steps left it. Each step prints
what it measured. Compose v2 goes through all of it where it is installed; docker-compose 1.29 brings the cluster up and
ends it. The images are looked at as either builds them.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from containers import ROOT, Project, installed, until
from tools.images import images_in

from pages import followed

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

PAGE = ROOT / "docs" / "deploy.md"
SERVER_BYTES_MAX = 1.3e9
(BASE_IMAGE,) = images_in((ROOT / "deploy/Dockerfile").read_text())
HEALTHY_S = 60.0
PROGRESS = "diloco_shard_tokens_merged_total"
EXPIRES = 'last_over_time(diloco_certificate_expires_timestamp_seconds{which="own"}[15s])'
"""Whose container was made anew along with Prometheus has an address of before, which an instant query knows for five
minutes."""
EVICTED, REFUSED = "diloco_shard_evictions_total", "diloco_shard_refused_calls_total"


TOOLS = """
for tool in cc gcc make pip pip3; do command -v $tool; done
for python in python /usr/bin/python3 /usr/local/bin/python3; do
  for tool in pip ensurepip; do $python -m $tool --version 2>/dev/null; done
done
true
"""
"""Says which there are."""


@pytest.fixture(scope="module", params=["v2", "v1"])
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    if request.param not in installed():
        pytest.skip(f"Compose {request.param} is not installed here")
    with Project(request.param) as project:
        project.run("docker-compose build")
        yield project


class Page:
    """The blocks of the page; notes which were run."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._blocks = followed(PAGE)
        self._began = time.monotonic()

    @property
    def left(self) -> list[str]:
        return list(self._blocks)

    def follow(self, name: str) -> str:
        """Run the next block, which must have this name; what it printed."""
        assert self.left[0] == name, "the test follows the page from top to bottom"
        print(f"{time.monotonic() - self._began:6.1f} s  {name}", flush=True)
        return self._project.run(self._blocks.pop(name))

    def leave_out(self, until: str) -> None:
        while self.left[0] != until:
            self._blocks.pop(self.left[0])

    def note(self, words: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s    {words}", flush=True)


def test_the_images_are_small_and_hold_no_tools(project: Project) -> None:
    names = [f"decoupled-diloco/{target}:e2e-{project.compose}" for target in ("server", "worker")]
    sizes = json.loads(project.run(f"docker image inspect {' '.join(names)}"))
    for name, image in zip(names, sizes, strict=True):
        print(f"{name}: {image['Size'] / 1e6:.0f} MB")
        assert image["Config"]["User"] == "10001:10001"
        assert image["Config"]["Healthcheck"]["Test"][0] == "CMD"
        assert image["Config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"

    def inside(image: str, commands: str) -> str:
        return project.run(f"docker run --rm --read-only --network none --entrypoint sh {image} -c '{commands}'")

    print(inside(names[0], "du -sm /opt/diloco/lib/python3*/site-packages/* | sort -rn | head -n 5; du -sm /opt"))
    assert "pip" in inside(os.environ.get("BASE_IMAGE") or BASE_IMAGE, TOOLS), "the base has what we look for"
    for name in names:
        assert inside(name, TOOLS) == ""
    assert "native kernels: /opt/" in inside(names[0], "python -m diloco_common.codec")
    cuda = inside(names[0], 'python -c "import torch; print(torch.version.cuda)"').strip()
    if cuda == "None":
        assert sizes[0]["Size"] < SERVER_BYTES_MAX
    else:
        print(f"the size is not judged: torch was built for CUDA {cuda}")


TRAINS = """
import os, tempfile
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset

batches = DataLoader(TensorDataset(torch.randn(64, 3, 256, 256)), batch_size=16, num_workers=2)
assert sum(len(batch) for (batch,) in batches) == 64
(Path.home() / ".cache" / "huggingface").mkdir(parents=True)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
model(next(iter(batches))[0]).sum().backward()
"""
"""Shared memory for workers of a loader, and a home for caches."""


def test_a_script_with_loader_workers_and_caches_runs_in_the_worker(project: Project) -> None:
    project.run(f"docker-compose run --rm -T --no-deps --entrypoint python worker -c {shlex.quote(TRAINS)}")


def test_a_wrong_setting_ends_up_at_once_and_says_why(project: Project) -> None:
    began = time.monotonic()
    said = project.run(
        "RUN_TOKENS=many docker-compose up -d 2>&1 && exit 1; docker-compose logs settings; docker-compose down -v 2>&1"
    )
    assert "settings" in said.partition("run.tokens")[0]
    assert "many" in said
    assert time.monotonic() - began < HEALTHY_S


@pytest.mark.parametrize("image", ["server", "worker"])
def test_process_1_passes_sigterm_on_before_python_can_take_it(project: Project, image: str) -> None:
    """Sent as soon as the container runs, while Python has no handler yet."""
    said = project.run(
        f"id=$(docker run -d --network none decoupled-diloco/{image}:e2e-{project.compose}"
        " --set security.insecure=true --set worker.shards=127.0.0.1:1); trap 'docker rm -f -v $id >/dev/null' EXIT\n"
        "docker stop -t 30 $id >/dev/null; docker inspect -f '{{.State.ExitCode}}' $id"
    )
    assert said.strip() == "0"


def test_the_page_is_followed_on_real_containers(project: Project) -> None:
    page = Page(project)
    comes_up(project, page)
    if project.compose == installed()[0]:
        trains(project, page)
        a_worker_dies(project, page)
        a_shard_dies(project, page)
        shards_are_exchanged(project, page)
        all_are_upgraded(project, page)
        certificates_are_renewed(project, page)
        a_worker_is_revoked(project, page)
        workers_come_and_go(project, page)
        ends(project, page)
        a_script_of_ones_own_trains(project, page)
    else:
        page.leave_out(until="stop")
        ends(project, page)


def ends(project: Project, page: Page) -> None:
    page.follow("stop")
    ended = project.health()
    page.note(f"ended: {ended}")
    assert set(ended.values()) == {"exit 0"}
    assert "draining" in project.said("shard-1")
    page.follow("remove")
    assert not project.containers()


def a_script_of_ones_own_trains(project: Project, page: Page) -> None:
    """A Trainer, in an image with what it needs, until the run has merged its tokens."""
    page.follow("own image")
    page.follow("own script")
    until(lambda: all(c["State"]["Status"] == "exited" for c in project.containers("worker")), "workers to end", 600)
    said = project.said("worker")
    page.note("; ".join(re.findall(r"worker-\d: \d+ parameters, after \d+ steps", said)))
    assert {health for name, health in project.health().items() if "worker" in name} == {"exit 0"}
    assert len(re.findall(r"worker-\d: \d+ parameters, after \d+ steps", said)) == 3
    page.follow("remove it")
    assert not project.containers()
    assert not page.left


def comes_up(project: Project, page: Page) -> None:
    load, began = os.getloadavg()[0], time.monotonic()
    page.follow("up")
    up = until(lambda: all_healthy(project), "every container to be healthy", seconds=240)
    took_s = time.monotonic() - began
    page.note(f"{len(up)} containers, all healthy after {took_s:.0f} s; load average before: {load:.1f}")
    if load < (os.cpu_count() or 1):  # on a machine that does something else, no time is a promise
        assert took_s < HEALTHY_S
    for container in project.containers():
        host = container["HostConfig"]
        assert host["Memory"] > 0, container["Name"]
        assert host["PidsLimit"] == 512, container["Name"]
        assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-file": "5", "max-size": "10m"}}
    # In /data files come and go.
    modes = project.run(
        "docker-compose exec -T shard-0 sh -c "
        "'cd /run/diloco && stat -c %a /data . shard-0 */key.pem && { stat -c %a /data/* || true; }'"
    )
    assert set(modes.split()) == {"700", "600"}
    keys = {
        name: in_volumes(project, name, "*.key", "key.pem")
        for name in ("certs", "shard-0", "worker", "page", "prometheus")
    }
    assert [name for name, found in keys.items() if "/certs/ca/ca.key" in found] == ["certs"]
    assert keys["prometheus"] == ["/run/diloco/observer-prometheus/key.pem"], "it cannot look at the page's"
    assert all("/observer-" in key for key in keys["page"])
    assert not any("learner" in key for key in keys["shard-0"])
    assert all("/learner-" in key for key in keys["worker"])
    page.note("every container is bounded, and its files are its own")
    jobs = until(lambda: targets_up(project, shards=2, workers=3), "Prometheus to scrape every target")
    page.note(f"Prometheus scrapes {jobs}")


def trains(project: Project, page: Page) -> None:
    merged = until(
        lambda: min_over_shards(project, PROGRESS) > 50_000 and project.values(PROGRESS), "50k merged tokens"
    )
    page.note(f"tokens merged by shard: {merged}")
    page.follow("logs")
    until(lambda: loss_falls(project), "the loss to fall in the log of every worker")
    judged = json.loads(page.follow("evaluate").splitlines()[-1])
    page.note(f"held-out loss {judged['eval_loss_first']:.2f} -> {judged['eval_loss_final']:.2f}")
    assert judged["eval_loss_final"] < judged["eval_loss_first"] - 1.0

    answers = page.follow("queries")
    assert "diloco_shard_learners" in answers
    assert 'state="alive"' in answers
    the_page_is_live(project, page)


def the_page_is_live(project: Project, page: Page) -> None:
    """It asks for its key, and shows three learners at two shards to whoever has it."""
    (key,) = set(re.findall(r"#key=(\S+)", page.follow("live page"))[-1:])
    address = f"http://{project.run('docker-compose port page 7171').strip()}"
    assert asked(f"{address}/learners", "") == (401, {"error": mock.ANY})

    def training() -> bool:
        code, found = asked(f"{address}/learners", key)
        return code == 200 and [row["state"] for row in found["rows"]] == ["training"] * 3

    until(training, "three learners on the live page")
    page.note("the live page asks for its key, and shows three learners to whoever has it")


def asked(url: str, key: str) -> tuple[int, Any]:
    """Status and JSON of a page that is asked with this key."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def a_worker_dies(project: Project, page: Page) -> None:
    until(lambda: alive(project) == [3, 3], "three learners alive")
    before = learners(project)
    page.follow("kill a worker")
    (dead,) = before - learners(project)
    until(lambda: min_over_shards(project, 'diloco_shard_evictions_total{code="LEASE_EXPIRED"}') >= 1, "an eviction")
    until(lambda: alive(project) == [2, 2], "two learners alive")
    assert f"evicted learner={dead}" in project.said("shard-0")
    until(lambda: alert_of(project, "DilocoWorkerSilent", learner=dead) == "firing", "the alert to fire")
    page.note(f"{dead} was evicted by both shards, and the alert fires")

    page.follow("bring it back")
    until(lambda: alive(project) == [3, 3], "three learners alive")
    until(lambda: f"returned learner={dead}" in project.said("shard-0"), "the word of its return")
    until(lambda: not alert_of(project, "DilocoWorkerSilent", learner=dead), "the alert to end")
    page.note("it has returned, and the alert is over")


def a_shard_dies(project: Project, page: Page) -> None:
    before = until(lambda: project.value(f"min({PROGRESS})"), "progress")
    page.follow("kill a shard")
    until(lambda: len(project.values(f"{PROGRESS} > {before}")) == 1 or None, "the other shard to go on alone")
    page.follow("bring the shard back")
    until(lambda: targets_up(project, shards=2, workers=3), "the shard to be scraped again")
    until(lambda: min_over_shards(project, PROGRESS) > before, "both shards to go on where they were")
    assert "recovered fragments=" in project.said("shard-0"), "it came back from its volume, not from the learners"
    page.note("the shard came back with its versions")


def shards_are_exchanged(project: Project, page: Page) -> None:
    before = min_over_shards(project, PROGRESS)
    page.follow("rolling restart")
    until(lambda: min_over_shards(project, PROGRESS) > before, "both shards to go on where they were")
    for shard in ("shard-0", "shard-1"):
        lives = re.findall(r"(?:ended|recovered fragments=.*) tokens_merged=(\d+)", project.said(shard))
        assert lives[-1] == lives[-2], "it comes back with as much as it ended with"
    assert max(project.values("diloco_shard_versions_lost_total").values()) == 0
    page.note("both shards were replaced and lost nothing")


def all_are_upgraded(project: Project, page: Page) -> None:
    """To images of another version."""
    before, merged, began = learners(project), min_over_shards(project, PROGRESS), time.monotonic()
    project.use(VERSION="9.9.9")
    page.follow("upgrade")
    # Prometheus is made anew as well: what it knew before is old for five minutes unless asked for what is new.
    versions = 'count by (version) (last_over_time(diloco_build_info{job=~"diloco-.*"}[15s]))'
    until(lambda: project.by("version", versions) == {"9.9.9": 5.0}, "shards and workers to show the new version alone")
    until(lambda: alive(project) == [3, 3] and learners(project) == before, "the same three learners")
    until(lambda: min_over_shards(project, PROGRESS) > merged, "both shards to go on where they were")
    until(lambda: targets_up(project, shards=2, workers=3), "Prometheus to scrape every target")
    window = f"{time.monotonic() - began:.0f}s"
    there = project.value(f'min_over_time(sum(up{{job="diloco-shard"}})[{window}:1s])')
    assert there >= 1, "never both shards away"
    page.note(f"all run the new version after {window}, under their names; at least {there:.0f} shard was there")
    lives = processes(project)
    project.run("docker-compose up -d")
    assert processes(project) == lives, "there is nothing left to exchange"


def certificates_are_renewed(project: Project, page: Page) -> None:
    listed = page.follow("who has a certificate")
    assert {"shard/0", "shard/1", "observer/prometheus"} < {line.partition(" ")[0] for line in listed.splitlines()}
    until(lambda: calm(project), "three learners, and no trouble since the shards were replaced")
    lives, before, expiry = processes(project), troubles(project), project.values(EXPIRES)
    assert len(expiry) == 5

    page.follow("renew")
    until(lambda: newer(project.values(EXPIRES), expiry), "every process to show its new certificate to Prometheus")
    for shard in ("shard-0", "shard-1"):
        assert "certificate read again" in project.said(shard)
    merges_of_all(project, learners(project))
    assert processes(project) == lives, "nobody was restarted"
    assert troubles(project) == before, "nobody was evicted, refused or had to connect again"
    assert targets_up(project, shards=2, workers=3)
    page.note("all were renewed while they trained; nobody was restarted or lost a lease")


def a_worker_is_revoked(project: Project, page: Page) -> None:
    load, before, lives = os.getloadavg()[0], troubles(project), processes(project)
    page.follow("revoke")
    revoked_at = float(project.run("docker-compose exec -T certs stat -c %.9Y /certs/ca/revoked.json"))
    listed = project.run("docker-compose exec -T certs diloco certs list --folder /certs/ca")
    (out,) = set(re.findall(r"^learner/(\S+) .* revoked ", listed, re.MULTILINE))
    honest = learners(project) - {out}
    assert len(honest) == 2
    (its_container,) = (c["Id"] for c in project.containers("worker") if learner_of(project, c) == out)
    for shard in ("shard-0", "shard-1"):
        line = rf"evicted learner={out} .*code=REVOKED"
        after_s = (
            until(lambda s=shard, found=line: project.first_said(s, found), f"{shard} to end its lease") - revoked_at
        )  # type: ignore[misc]
        page.note(f"{shard} ended the lease of {out} {after_s:.2f} s after it was revoked; load average: {load:.1f}")
        if load < (os.cpu_count() or 1):
            assert after_s < 1.0

    merges_of_all(project, honest)
    until(lambda: alive(project) == [2, 2], "two learners with a lease")
    assert troubles(project, but=out) == {name: count for name, count in before.items() if out not in name}
    assert {n: life for n, life in processes(project).items() if not n.startswith(out)} == {
        n: life for n, life in lives.items() if not n.startswith(out)
    }
    page.note("the two honest ones went on merging; none of them was evicted, refused or had to connect again")

    def waits() -> bool:
        (container,) = (c for c in project.containers("worker") if c["Id"] == its_container)
        said = project.run(f"docker logs --tail 1 {its_container} 2>&1")
        return bool(container["RestartCount"]) and said.startswith(f"{out} waits for its certificate")

    until(waits, "it to wait for another certificate")
    page.follow("let it in again")
    until(lambda: alive(project) == [3, 3], "it to be back")
    (container,) = (c for c in project.containers("worker") if c["Id"] == its_container)
    assert container["RestartCount"] == 1, "it was not started again and again"
    assert learner_of(project, container) == out
    until(lambda: targets_up(project, shards=2, workers=3), "Prometheus to scrape every target")


def merges_of_all(project: Project, wanted: set[str]) -> None:
    """Wait until three more rounds of each shard have merged something of each of them."""
    query = 'min by (learner) (diloco_shard_learner_contributions_total{fate="merged"})'
    before = project.by("learner", query)
    until(
        lambda: all(project.by("learner", query).get(name, 0) >= before.get(name, 0) + 3 for name in wanted),
        f"three more contributions of each of {len(wanted)} to be merged",
    )


def calm(project: Project) -> bool:
    """Whether all take part, and none of it has happened for some scrapes."""
    return alive(project) == [3, 3] and troubles(project) == troubles(project, ago="offset 15s")


def troubles(project: Project, but: str = "", ago: str = "") -> dict[str, float]:
    """What must not happen to an honest learner: how often it has. `but`: except to this one."""
    found = {}
    for metric in (EVICTED, REFUSED):
        by_code = project.by("code", f"sum by (code) ({metric} {ago})")
        found |= {f"{metric} {code}": count for code, count in by_code.items() if code != "REVOKED"}
    at = " * on (instance) group_left () ".join(
        f"last_over_time({metric}[15s] {ago})" for metric in ("diloco_worker_learner", "diloco_worker_reconnects_total")
    )
    reconnects = project.by("learner", f"max by (learner) ({at})")
    return found | {f"reconnects of {name}": count for name, count in reconnects.items() if name != but}


def learners(project: Project) -> set[str]:
    """The learners that run in workers' containers."""
    return {learner_of(project, c) for c in project.containers("worker") if c["State"]["Running"]}


def learner_of(project: Project, container: dict[str, Any]) -> str:
    own = project.run(f"docker exec {container['Id']} readlink /tmp/own 2>/dev/null || true")
    return own.strip().rpartition("/learner-")[2]


def processes(project: Project) -> dict[str, tuple[str, int]]:
    """Learner, or host name, of each container -> when it was started, and how often again."""
    workers = {c["Id"]: learner_of(project, c) for c in project.containers("worker") if c["State"]["Running"]}
    return {
        workers.get(c["Id"], c["Config"]["Hostname"]): (c["State"]["StartedAt"], c["RestartCount"])
        for c in project.containers()
        if c["State"]["Running"]
    }


def newer(now: dict[str, float], before: dict[str, float]) -> bool:
    return now.keys() == before.keys() and all(now[name] > before[name] for name in now)


def in_volumes(project: Project, service: str, *names: str) -> list[str]:
    """Files of these names that a container of the service can see in what is mounted."""
    wanted = " -o ".join(f"-name '{name}'" for name in names)
    command = f"find /run/diloco /certs {wanted} 2>/dev/null; true"
    return sorted(project.run(f'docker-compose exec -T {service} sh -c "{command}"').split())


def workers_come_and_go(project: Project, page: Page) -> None:
    page.follow("scale up")
    until(lambda: alive(project) == [4, 4], "the fourth learner")
    page.follow("scale down")
    until(lambda: alive(project) == [3, 3], "its goodbye")
    assert "left learner=" in project.said("shard-0")

    page.follow("chaos")
    (straggler,) = project.containers("straggler")
    here = 'min by (learner) (diloco_shard_learner_state{state="alive"}) == 1'
    until(lambda: learner_of(project, straggler) in project.by("learner", here), "the straggler to train")
    page.follow("no chaos")


def all_healthy(project: Project) -> dict[str, str]:
    found = {name: health for name, health in project.health().items() if "settings" not in name}  # that one ends
    return found if set(found.values()) == {"healthy"} else {}


def targets_up(project: Project, *, shards: int, workers: int) -> dict[str, int]:
    """Job -> targets that Prometheus scrapes without fault, once these are all of them."""
    targets = (project.prometheus("targets") or {"activeTargets": []})["activeTargets"]
    found: dict[str, int] = {}
    for target in targets:
        if target["health"] == "up":
            found[target["labels"]["job"]] = found.get(target["labels"]["job"], 0) + 1
    wanted = {"diloco-shard": shards, "diloco-worker": workers, "prometheus": 1}
    return found if found == wanted and len(targets) == sum(wanted.values()) else {}


def min_over_shards(project: Project, query: str) -> float:
    """The smallest value of the two shards; -inf until both have one."""
    found = project.values(query)
    return min(found.values()) if len(found) == 2 else -math.inf


def alive(project: Project) -> list[float]:
    """Learners with a lease, as each shard counts them."""
    return sorted(project.values('diloco_shard_learners{state="alive"}').values())


def loss_falls(project: Project) -> bool:
    """Whether the last loss in every worker's log is well below the first."""
    losses: dict[str, list[float]] = {}
    for learner, loss in re.findall(r" (\S+) training inner_step=\d+ loss=([\d.]+)", project.said("worker")):
        losses.setdefault(learner, []).append(float(loss))
    return len(losses) == 3 and all(found[-1] < found[0] - 1.0 for found in losses.values())


def alert_of(project: Project, name: str, **labels: str) -> str:
    """ "pending" or "firing"; empty if there is no such alert."""
    alerts = (project.prometheus("alerts") or {"alerts": []})["alerts"]
    wanted = {"alertname": name, **labels}
    return next((a["state"] for a in alerts if wanted.items() <= a["labels"].items()), "")
