"""What `diloco doctor` finds, where no error of a command says the same already."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind


def _finding(code: str, means: str, do: str, look: str = "") -> Entry:
    return Entry(code, Kind.FINDING, means, do, look)


LINK = (
    _finding(
        "NAME_UNKNOWN", "The host name of a shard has no address on this machine.",
        "Correct the name, or add it to DNS or /etc/hosts.", "`getent hosts NAME` here and on another machine",
    ),
    _finding(
        "PORT_CLOSED", "The machine answers, but nothing listens on that port: a wrong port, or a shard that is down.",
        "Correct the port, or start the shard. Its log says `serving` with the right one.", "`shard.listen`",
    ),
    _finding(
        "PORT_SILENT",
        "Nobody answers at all, not even with a refusal: a firewall drops the packets, or the address is wrong.",
        "Let TCP to that port through, from learners to shards. Learners need no inbound rule.",
        "firewalls on both machines and the rules of the cloud between them; [ports](wan.md#ports-and-direction)",
    ),
    _finding(
        "NO_ANSWER",
        "The port takes connections, and the shard answers no call: its process is stopped, or its machine overloaded.",
        "Look at the process, and restart it if it hangs.",
        "`diloco health --grpc HOST:PORT` on the shard's machine",
    ),
    _finding(
        "CERTIFICATE_ENDS_SOON", "The certificate of this machine, or of the shard, expires within 14 days.",
        "Renew it (`diloco certs issue`): it is read again without a restart.", "`diloco certs list`",
    ),
    _finding(
        "CLOCK_SKEWED",
        "The clocks of this machine and of the shard differ. Rounds and leases do not mind. Certificates and signed "
        "tokens do: they begin and end too early or too late.",
        "Set both clocks by NTP (`timedatectl set-ntp true`).", "`date -u` on both machines",
    ),
    _finding(
        "CLOCK_UNKNOWN", "The shard does not tell the time: it is of an older version.", "Install equal versions.",
    ),
    _finding(
        "PACKAGES_DIFFER", "Shard and caller have different versions of the package, and speak the same protocol.",
        "It works. Install equal versions when you can.", "`diloco --version` on both machines",
    ),
    _finding(
        "SHARDS_MISSING", "The run has more shards than were named.",
        "Name every shard: a learner needs all of them.", "`worker.shards`",
    ),
    _finding(
        "LINK_FAR", "A round trip takes longer than half a second.",
        "Set `lease.lease_s` to at least ten round trips, and H so that a round trip is a small part of H steps.",
        "the route to the shards: a VPN, a satellite, a full line",
    ),
    _finding(
        "LINK_THIN",
        "The link cannot carry what the run's settings ask for in time: this learner would always be late. Its work is "
        "carried, so none is lost, but it counts later.",
        "Use what the finding proposes: a larger H, or smaller encodings. Or a faster link.",
        "[WAN](wan.md); `diloco plan`",
    ),
    _finding(
        "LINK_UNMEASURED", "The bandwidth could not be measured.",
        "Start one learner, so that there is a version to pull, and ask again.",
    ),
)  # fmt: skip

MACHINE = (
    _finding(
        "DISK_SLOW",
        "The disk of the data folder takes too long to make a version durable: rounds wait for it.",
        'Use a local disk. Or set `shard.durability = "interval"`, which may lose the last versions in a crash.',
        "`shard.data_dir`: is it on a network?; [keeping versions](performance.md#keeping-versions)",
    ),
    _finding(
        "DISK_SMALL", "The disk has no room for the versions that the shard keeps.",
        "Free some space, or use a larger volume, before you start the shard.", "`df -h` of `shard.data_dir`",
    ),
    _finding(
        "DISK_UNUSABLE", "The data folder cannot be made, or cannot be written to.",
        "Make it, and give it to the user who runs the shard.", "the system's own words in the finding",
    ),
    _finding(
        "NOT_DURABLE", "No data folder is set: versions stay in memory, and a restart of the shard begins anew.",
        "Set `shard.data_dir`, except for a test.", "`shard.data_dir`",
    ),
    _finding(
        "FILES_FEW", "The shard may open fewer files than its learners need: it lets fewer connections in.",
        "Raise the hard limit: `ulimit -Hn`, `LimitNOFILE=` of systemd, `--ulimit nofile=` of Docker.",
        "`shard.max_learners`, `shard.max_connections`",
    ),
    _finding(
        "MEMORY_SHORT", "The machine, or its cgroup, has less memory than the shard will need.",
        "Use a larger machine or limit, or more shards.", "[memory of a shard](performance.md#memory-of-a-shard)",
    ),
    _finding(
        "KERNELS_MISSING",
        "There are no native kernels: merging and encoding run in torch, and take several times as long.",
        "Do what the finding says: install a C compiler (Debian: `gcc libc6-dev`), or the wheel for this machine.",
        "`python -m pip show decoupled-diloco`",
    ),
    _finding(
        "COMPILER_MISSING",
        "There is no C compiler, and the package brought no kernels for this machine: they cannot be built here.",
        "Install a C compiler (Debian: `gcc libc6-dev`), or the wheel for this machine.", "`cc --version`",
    ),
)  # fmt: skip

OF_DOCTOR = (
    _finding(
        "CHECK_TIMED_OUT",
        "A check did not end in its time. The others go on without it.",
        "Run the doctor again. If it stays so, look at what this check asks.",
        "the check's name",
    ),
    _finding("CHECK_FAILED", "A check broke, which is a bug of the doctor.", "Please file an issue."),
    _finding("SKIPPED", "The check needs one that failed.", "Mend that one first, and run the doctor again."),
)

FINDINGS = (*LINK, *MACHINE, *OF_DOCTOR)
