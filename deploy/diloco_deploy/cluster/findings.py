"""Finds what is wrong in a cluster, from the model and the time. Pure.

`diloco status`, its JSON and `--strict`, the live page, `diloco doctor` and `diloco up` show these findings, and
report nothing else about a running cluster. `diloco explain` knows their codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from diloco_common import formulas, units
from diloco_common.errors import Draining, Expired, Revoked, Unavailable, VersionUndone, some
from diloco_common.wire.calls import LONG_S, SAY_EVERY_S
from diloco_deploy import ASK_S
from diloco_deploy.cluster.members import SeenLearner, SeenMember, Status
from diloco_deploy.cluster.model import Cluster

SHORT = 0.5
"""A learner is reported if less than this share of its contributions' length is kept."""
ENDS_SOON_S = 14 * 86_400.0
"""Certificates that expire sooner than this are reported; the alert has the same limit."""
SKEW_S = 10.0
"""Larger differences between clocks are reported."""
BYTES_PER_PARAMETER = max(formulas.version_bytes(outer, "int8") for outer in formulas.MOMENTUM_BYTES)
"""Maximum number of bytes of one version with its outer optimizer."""
NO_TOKENS_STEPS = 10
"""Steps without a token after which a learner is reported."""
STANDS = frozenset({"STORAGE", "NO_PROGRESS"})
"""Codes that mean that the run makes no versions, or not of all fragments."""
GONE = frozenset({"SHARD_AWAY", "SHARD_UNKNOWN", "WORKER_AWAY", "LEFT_OUT", Revoked.code, Expired.code})
"""Codes that mean that an expected member is missing."""
OF_SHARDS = frozenset({"SHARD_AWAY", "SHARD_UNKNOWN", Expired.code})
_HERE = ("up", "heard")
_DONE = ("ended", "left")


@dataclass(frozen=True)
class Finding:
    """A problem to report. The fields are those of `problems` in `diloco status --json`."""

    code: str
    member: str
    words: str
    """The problem, its effect, and its cause."""
    do: str
    since_s: float | None = None

    def __str__(self) -> str:
        return f"{self.words}; {self.do} [{self.code}]"


def findings(cluster: Cluster, now: float, silent_after_s: float = ASK_S) -> list[Finding]:
    """Findings of shards, then of learners. `now`: by the clock of the model.

    `silent_after_s`: a process that has not answered for this long is away; infinite, if the caller tracks that itself.
    """
    found = [one for shard in cluster.shards for one in _of_shard(cluster, shard, now, silent_after_s)]
    found += _unasked(cluster)
    found += _packages(cluster)
    members = {member.name: member for member in cluster.workers}
    for name in sorted({*members, *cluster.learners}, key=natural):
        found += _of_learner(name, members.get(name), cluster.learners.get(name), now, silent_after_s)
    return found


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# ------------------------------------------------------------ shards


def _of_shard(cluster: Cluster, shard: SeenMember, now: float, silent_after_s: float) -> Iterator[Finding]:
    if shard.process == "not asked":
        yield Finding(
            "SHARD_UNKNOWN", shard.label, f"{shard.label} was not asked, and no member mentions it",
            "add its address to --http",
        )  # fmt: skip
    elif shard.process not in (*_HERE, *_DONE) or _silent_s(shard, now) > silent_after_s:
        yield _shard_away(cluster, shard, now)
    elif shard.status:
        yield from _not_ready(shard)
        yield from _no_progress(cluster, shard)
        yield from _certificate(shard)
        yield from _disk(shard)
        yield from _clock(shard)
        yield from _readers(shard)


def _readers(shard: SeenMember) -> Iterator[Finding]:
    for away in shard.get("readers_away", ()):
        since_s, role = float(away.get("for_s") or 0.0), away.get("role")
        if since_s < LONG_S:
            continue
        costs = (
            "learners of its site pull from the shard"
            if role == "mirror"
            else ("if the shard's machine is lost now, so are its versions since")
        )
        words = f"a {role} of {shard.label} ({away.get('name')}) is away{_for(since_s)}: {costs}"
        yield Finding(
            "READER_AWAY",
            shard.label,
            words,
            "restart it; if it is not wanted any more, restart the shard, which then forgets it",
            since_s,
        )


def _silent_s(member: SeenMember, now: float) -> float:
    """How long a process that is up has not answered."""
    return 0.0 if member.heard_at is None or not member.answers else now - member.heard_at


def _shard_away(cluster: Cluster, shard: SeenMember, now: float) -> Finding:
    since_s = _away_s(shard, now)
    left_s = float(shard.get("certificate_s", inf)) - (now - (shard.heard_at or now))  # according to its last answer
    if shard.why_code == Expired.code or left_s <= 0:
        words = f"the certificate of {shard.label} has expired{_for(since_s)}: nobody can call it{_because(shard)}"
        return Finding(Expired.code, shard.label, words, "issue another: `diloco certs issue`", since_s)
    part = {1: "the whole", 2: "half of the", 3: "a third of the", 4: "a quarter of the"}
    share = part.get(count := _count(cluster), f"a {count}th part of the")
    words = (
        f"{shard.label} is {_standing(shard)}{_for(since_s)}{_because(shard)}: {share} model is away and gets no new "
        "versions; learners keep training and lose nothing"
    )
    return Finding("SHARD_AWAY", shard.label, words, shard.again or "restart it with its data folder", since_s)


def _not_ready(shard: SeenMember) -> Iterator[Finding]:
    if shard.get("ready", True):
        return
    reason = str(shard.get("reason", ""))
    kind, _, why = reason.partition(": ")
    if kind == "storage":
        words = f"{shard.label}: the disk takes no versions, and the run waits for it: {why}"
        do = "free space, or bring its data folder back: it continues by itself"
        yield Finding("STORAGE", shard.label, words, do)
    elif kind == "recovering":
        yield Finding("RECOVERING", shard.label, f"{shard.label} reads its data folder, and serves nobody yet", "wait")
    elif kind == "draining":
        yield Finding(Draining.code, shard.label, f"{shard.label} is shutting down", "start it again once it has ended")
    else:
        yield Finding("UNEXPECTED", shard.label, f"{shard.label} is not ready: {reason}", "start it again")


def _no_progress(cluster: Cluster, shard: SeenMember) -> Iterator[Finding]:
    """Rounds open for far longer than usual, or too few learners for any."""
    limit_s, quorum = shard.get("overdue_after_s"), shard.get("quorum")
    if limit_s is None or shard.get("done") or any(not f.get("seeded", True) for f in shard.get("fragments", ())):
        return
    overdue = [f for f in shard.get("fragments", ()) if float(f.get("open_s") or 0.0) > limit_s]
    absent = _absent(cluster, shard)
    needs = f", and a round needs {quorum} (sync.quorum)" if quorum else ""
    do = "fix what is reported about the missing learners" + (", or lower the quorum" if quorum and quorum > 1 else "")
    if overdue:
        oldest = max(overdue, key=lambda f: float(f["open_s"]))
        waits = {str(name): "has not contributed" for name in oldest.get("missing") or ()} | absent
        words = (
            f"{shard.label}: {len(overdue)} rounds are overdue; that of fragment {oldest['id']} for version "
            f"{oldest.get('round')} is open{_for(float(oldest['open_s']))} (usual: below {units.clock(limit_s)}). It "
            f"has {oldest.get('contributions', 0)} contributions{needs}; missing: {_names(waits)}"
        )
        yield Finding("NO_PROGRESS", shard.label, words, do, float(oldest["open_s"]))
        return
    able = sum(one.get("state") == "alive" and not one.get("left_out") for one in shard.get("learners", ()))
    if quorum and able < quorum and float(shard.get("uptime_s", 0.0)) > limit_s:
        words = f"{shard.label}: no round can close: {able} learners can contribute{needs}; missing: {_names(absent)}"
        yield Finding("NO_PROGRESS", shard.label, words, do)


def _absent(cluster: Cluster, shard: SeenMember) -> dict[str, str]:
    """Learners that contribute nothing to this shard's rounds, and why."""
    found = {}
    for said in shard.get("learners", ()):
        name, state = str(said["id"]), str(said.get("state"))
        if state == "evicted":
            found[name] = "revoked" if said.get("evicted_for") == Revoked.code else "away"
        elif state == "stalled":
            found[name] = "stalled"
        elif said.get("left_out"):
            found[name] = "left out"
        elif (learner := cluster.learners.get(name)) is not None and learner.state == "stalled":
            found[name] = "stalled"
    return found


def _certificate(shard: SeenMember) -> Iterator[Finding]:
    left_s = shard.get("certificate_s")
    if left_s is None or left_s > ENDS_SOON_S:
        return
    do = "renew it (`diloco certs issue`): no restart is needed"
    if left_s <= 0:
        words = f"the certificate of {shard.label} expired {units.clock(-left_s)} ago: nobody can call it"
        yield Finding(Expired.code, shard.label, words, do, -left_s)
    else:
        days, hours = divmod(int(left_s // 3600), 24)
        words = f"the certificate of {shard.label} expires in {days} d {hours} h, and nothing has renewed it"
        yield Finding("CERTIFICATE_ENDS_SOON", shard.label, words, do)


def _disk(shard: SeenMember) -> Iterator[Finding]:
    free = shard.get("disk_free_bytes")
    wanted = BYTES_PER_PARAMETER * sum(int(f.get("elements") or 0) for f in shard.get("fragments", ()))
    if free is not None and shard.get("data_dir") and free < wanted:
        words = f"{shard.label}: {units.size(free)} of its disk is free; one more version of each fragment may not fit"
        yield Finding("DISK_SMALL", shard.label, words, "free some space, or use a larger volume")


def _clock(shard: SeenMember) -> Iterator[Finding]:
    skew_s = float(shard.get("clock_skew_s") or 0.0)
    if abs(skew_s) > SKEW_S:
        way = "ahead of" if skew_s > 0 else "behind"
        words = f"the clock of {shard.label} is {abs(skew_s):,.0f} s {way} ours, and certificates depend on it"
        yield Finding("CLOCK_SKEWED", shard.label, words, "set both by NTP (`timedatectl set-ntp true`)")


def _unasked(cluster: Cluster) -> Iterator[Finding]:
    """Shards of the run that were not asked, known from shards and learners."""
    members = cluster.shards
    known = {shard.get("index") for shard in members} | {None} | {_index(shard.label) for shard in members}
    missed: dict[int, float] = {}
    for shard in members:
        for said in shard.get("learners", ()) if shard.answers else ():
            for away in said.get("away") or ():
                if (index := away.get("index")) not in known:
                    missed[int(index)] = max(float(away.get("for_s") or 0.0), missed.get(int(index), 0.0))
    for index, since_s in sorted(missed.items()):
        words = f"learners do not reach shard-{index}{_for(since_s)}"
        yield Finding("SHARD_AWAY", f"shard-{index}", words, "restart it with its data folder", since_s)
    count = _count(cluster) - len(members) - len(missed)
    if count > 0:
        words = f"{count} of the run's shards {'is' if count == 1 else 'are'} not asked"
        yield Finding("SHARD_UNKNOWN", "", words, "give all addresses (--http)")


def _index(name: str) -> int | None:
    found = re.fullmatch(r"shard-(\d+)", name)
    return int(found[1]) if found else None


def _count(cluster: Cluster) -> int:
    return max([int(shard.get("count", 0)) for shard in cluster.shards] + [len(cluster.shards)])


def _packages(cluster: Cluster) -> Iterator[Finding]:
    packages = {m.label: str(m.get("package")) for m in cluster.members.values() if m.answers and m.get("package")}
    if len(set(packages.values())) > 1:
        each = ", ".join(f"{name} {package}" for name, package in packages.items())
        yield Finding("PACKAGES_DIFFER", "", f"members run different versions: {each}", "install equal versions")


# ------------------------------------------------------------ learners


def _of_learner(
    name: str, member: SeenMember | None, learner: SeenLearner | None, now: float, silent_after_s: float
) -> Iterator[Finding]:
    told = learner.told if learner is not None else []
    if any(one.get("evicted_for") == Revoked.code and one.get("state") == "evicted" for one in told):
        words = f"{name} is revoked: no shard lets it in, and the others keep training"
        yield Finding(Revoked.code, name, words, "give it a new identity, or remove it", _least(told, "silent_s"))
        return
    if member is not None and member.process not in (*_HERE, *_DONE):
        yield _worker_away(name, member, _away_s(member, now))
    elif member is not None and (silent_s := _silent_s(member, now)) > silent_after_s:
        yield _worker_away(name, member, silent_s)
    elif learner is not None and (member is None or member.process == "up") and learner.state == "away":
        yield _worker_away(name, SeenMember(name, "worker", "away", why_not=learner.who_says), now - learner.heard_at)
    elif learner is not None and learner.is_here:
        yield from _of_standing(name, learner)
    if member is not None and member.answers:
        yield from _own_words(name, member)


def _worker_away(name: str, member: SeenMember, since_s: float | None) -> Finding:
    words = f"{name} is {_standing(member)}{_for(since_s)}{_because(member)}: the others keep training"
    return Finding("WORKER_AWAY", name, words, member.again or "restart it, and it continues", since_s)


def _of_standing(name: str, learner: SeenLearner) -> Iterator[Finding]:
    """Findings about a learner with a lease, from the shards' statuses."""
    if learner.state == "stalled":
        since_s = _least(learner.told, "last_step_s")
        words = f"{name} is stalled: it sends heartbeats, but ends no inner step{_for(since_s)}"
        yield Finding("STALLED", name, words, "find out what its loop waits for: data, a lock, or a device", since_s)
    if learner.state == "partly":
        words = f"{name} is cut off from {', '.join(learner.away_at)}: its work on that part of the model waits"
        yield Finding("CUT_OFF", name, words, f"run `diloco doctor` on the machine of {name}")
    if any(one.get("left_out") for one in learner.told):
        cosine = min((float(one["cosine"]) for one in learner.told if one.get("cosine") is not None), default=None)
        how = "" if cosine is None else f" (cosine {cosine:.2f})"
        words = (
            f"{name} is left out: what it contributes points away from the others, or is the same again and again"
            f"{how}; it follows their values"
        )
        do = "compare its data, its labels and its learning rate with theirs; it comes back by itself"
        yield Finding("LEFT_OUT", name, words, do)
        return
    kept = min((float(one["kept"]) for one in learner.told if one.get("kept") is not None), default=1.0)
    if kept < SHORT:
        words = f"{name} is shortened: its contributions are far longer, and {kept:.0%} of their length counts"
        yield Finding("SHORTENED", name, words, "lower its learning rate, or compare its batches with the others'")
    if failing := [one for one in learner.told if float(one.get("pushes_fail_s") or 0.0) >= SAY_EVERY_S]:
        where, since_s = ", ".join(one["shard"] for one in failing), max(float(one["pushes_fail_s"]) for one in failing)
        why = failing[0].get("pushes_fail_why")
        words = f"{name}: pushes to {where} have failed{_for(since_s)} ({why}): its work is not merged there"
        do = "look for a proxy's limit (413: `client_max_body_size`), or the MTU, on the way"
        yield Finding("PUSHES_FAIL", name, words, do, since_s)
    if learner.inner_step >= NO_TOKENS_STEPS and not learner.tokens:
        words = f"{name} has taken {learner.inner_step} steps, and always reported tokens=0: its work is never merged"
        yield Finding("NO_TOKENS", name, words, "count the tokens of the batch: `learner.step(tokens=...)`")


def _own_words(name: str, worker: SeenMember) -> Iterator[Finding]:
    """Findings that only a worker's own status shows: refusals by shards, and undone versions."""
    for shard in worker.get("shards", ()):
        code = str(shard.get("code") or "")
        if code and code != Unavailable.code and not shard.get("connected"):
            words = f"{name} has no lease at {shard.get('address')}: {shard.get('why')}"
            yield Finding(code, name, words, f"`diloco explain {code}`")
    if undone := int(worker.get("versions_undone", 0)):
        words = f"{name}: its steps took back {undone} versions: something writes a copy over the model"
        yield Finding(VersionUndone.code, name, words, f"`diloco explain {VersionUndone.code}`")


# ------------------------------------------------------------ words


def _standing(member: SeenMember) -> str:
    return {"died": "dead", "lost": "dead", "starting": "starting"}.get(member.process, "away")


def _away_s(member: SeenMember, now: float) -> float | None:
    since = member.since if member.since is not None else member.heard_at
    return None if since is None else max(0.0, now - since)


def _because(member: SeenMember) -> str:
    return f" ({member.why_not})" if member.why_not and member.why_not != "not asked yet" else ""


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {units.clock(seconds)}"


def _least(told: list[Status], key: str) -> float | None:
    return min((float(one[key]) for one in told if one.get(key) is not None), default=None)


def _names(why: dict[str, str]) -> str:
    return some([f"{name} ({words})" for name, words in why.items()]) or "nobody that it knows"
