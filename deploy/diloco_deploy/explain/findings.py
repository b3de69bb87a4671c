"""What `diloco doctor` finds, where no error of a command says the same already."""

from __future__ import annotations

from diloco_deploy.explain.entry import Entry, Kind


def _finding(code: str, means: str, do: str, look: str = "") -> Entry:
    return Entry(code, Kind.FINDING, means, do, look)


LINK = (
    _finding(
        "NAME_UNKNOWN", "A shard's host name has no address on this machine.",
        "Correct the name, or add it to DNS or /etc/hosts.", "`getent hosts NAME` here and elsewhere",
    ),
    _finding(
        "PORT_CLOSED", "The machine answers, but nothing listens on that port.",
        "Correct the port, or start the shard. Its log names the port (`serving`).", "`shard.listen`",
    ),
    _finding(
        "PORT_SILENT", "Nobody answers: a firewall drops the packets, or the address is wrong.",
        "Let TCP to that port through, from learners to shards.",
        "firewalls on and between both machines; [ports](wan.md#ports-and-direction)",
    ),
    _finding(
        "NO_ANSWER", "The port takes connections, but the process is stopped, or its machine overloaded.",
        "Look at the process, and restart it if it hangs.",
        "`diloco health --grpc HOST:PORT` on the shard's machine",
    ),
    _finding(
        "CERTIFICATE_ENDS_SOON", "This machine's certificate, or the shard's, expires within 14 days.",
        "Renew it (`diloco certs issue`): no restart is needed.", "`diloco certs list`",
    ),
    _finding(
        "CLOCK_SKEWED",
        "Both clocks differ. Certificates and signed tokens begin and end at the wrong time.",
        "Set both clocks by NTP (`timedatectl set-ntp true`).", "`date -u` on both machines",
    ),
    _finding("CLOCK_UNKNOWN", "The shard is older, and does not tell the time.", "Install equal versions."),
    _finding(
        "PACKAGES_DIFFER", "Shard and caller have different versions of the package, but one protocol.",
        "It works. Install equal versions when you can.", "`diloco --version` on both machines",
    ),
    _finding(
        "SHARDS_MISSING", "The run has more shards than were named.",
        "Name every shard: a learner needs all of them.", "`worker.shards`",
    ),
    _finding(
        "LINK_FAR", "A round trip takes longer than half a second.",
        "Set `lease.lease_s` to at least ten round trips, and raise H.",
        "the route to the shards: a VPN, a satellite, a full line",
    ),
    _finding(
        "LINK_THIN", "The link cannot carry what the settings ask for: this learner would always be late.",
        "Use what the finding proposes, or a faster link.",
        "[WAN](wan.md); `diloco plan`",
    ),
    _finding(
        "LINK_UNMEASURED", "The bandwidth could not be measured.",
        "Start one learner, and ask again.",
    ),
)  # fmt: skip

MACHINE = (
    _finding(
        "DISK_SLOW", "The disk takes too long to make a version durable: rounds wait for it.",
        'Use a local disk. Or set `shard.durability = "interval"`, which may lose the last versions in a crash.',
        "`shard.data_dir`; [keeping versions](performance.md#keeping-versions)",
    ),
    _finding(
        "DISK_SMALL", "The disk has no room for the versions that the shard keeps.",
        "Free some space, or use a larger volume.", "`df -h` of `shard.data_dir`",
    ),
    _finding(
        "DISK_UNUSABLE", "The data folder cannot be made, or cannot be written to.",
        "Make it, and give it to the user who runs the shard.", "the system's own words in the finding",
    ),
    _finding(
        "NOT_DURABLE", "No data folder is set: a restart of the shard begins anew.",
        "Set `shard.data_dir`, except for a test.", "`shard.data_dir`",
    ),
    _finding(
        "FILES_FEW", "The shard may open fewer files than its learners need.",
        "Raise the hard limit: `ulimit -Hn`, `LimitNOFILE=` of systemd, `--ulimit nofile=` of Docker.",
        "`shard.max_learners`, `shard.max_connections`",
    ),
    _finding(
        "MEMORY_SHORT", "The machine, or its cgroup, has less memory than the shard will need.",
        "Use a larger machine or limit, or more shards.", "[memory of a shard](performance.md#memory-of-a-shard)",
    ),
    _finding(
        "KERNELS_MISSING", "There are no native kernels: merging and encoding take several times as long.",
        "Install the wheel for this machine, or a C compiler (Debian: `gcc libc6-dev`); then build them: "
        "`python -m diloco_common.codec --build`.",
        "`python -m diloco_common.codec`",
    ),
)  # fmt: skip

OF_DOCTOR = (
    _finding(
        "CHECK_TIMED_OUT", "A check did not end in its time. The others go on.",
        "Run the doctor again, or look at what it asks.", "the check's name",
    ),
    _finding("CHECK_FAILED", "A check broke, which is a bug of the doctor.", "Please file an issue."),
    _finding("SKIPPED", "The check needs one that failed.", "Mend that one first, and run the doctor again."),
)  # fmt: skip

FINDINGS = (*LINK, *MACHINE, *OF_DOCTOR)
