#!/usr/bin/env bash
# What tests/launchers/test_slurm.py needs: Slurm, munge and network namespaces. As root on Debian or Ubuntu, what is
# missing is installed (15 s); none of its services is used.
#
#   source tests/launchers/get_slurm.sh && get_slurm     1 if there is no Slurm and none can be had; says why

get_slurm() {
  [ "$(id -u)" = 0 ] || { echo "machines in network namespaces take root" >&2; return 1; }
  local needed=(slurmctld slurmd srun munged ip setpriv) program missing=()
  for program in "${needed[@]}"; do PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || missing+=("$program"); done
  if [ "${#missing[@]}" -gt 0 ]; then
    command -v apt-get >/dev/null || { echo "not installed, and there is no apt: ${missing[*]}" >&2; return 1; }
    mkdir -p .cache
    # Nobody starts slurmd and munged as services of this machine.
    (apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      slurmctld slurmd slurm-client munge iproute2 util-linux) >.cache/slurm.log 2>&1 \
      || { echo "apt could not install Slurm: $(tail -n 1 .cache/slurm.log)" >&2; return 1; }
  fi
  ip netns add "diloco-try-$$" 2>/dev/null && ip netns del "diloco-try-$$" \
    || { echo "this machine does not let us make network namespaces" >&2; return 1; }
}
