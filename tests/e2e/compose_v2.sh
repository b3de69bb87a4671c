#!/usr/bin/env bash
# Get Compose v2 and buildx, which Debian 12 does not have: the packages of Debian 13, unpacked and not installed, from
# the mirror that apt uses on this machine.
#
#   tests/e2e/compose_v2.sh [FOLDER]      prints the folder, to be used as DOCKER_CONFIG (.cache/docker)
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-$PWD/.cache/docker}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ ! -e "$folder/cli-plugins/docker-compose" ] || [ ! -e "$folder/cli-plugins/docker-buildx" ]; then
  apt=$folder/apt
  mkdir -p "$apt/sources" "$apt/state/lists/partial" "$apt/cache/archives/partial"
  for list in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
    [ ! -s "$list" ] || sed 's/bookworm/trixie/g' "$list" >"$apt/sources/$(basename "${list/%sources.list/debian.list}")"
  done
  printf '%s "%s";\n' Dir::Etc::sourcelist /dev/null Dir::Etc::sourceparts "$apt/sources" Dir::State "$apt/state" \
    Dir::State::status /dev/null Dir::Cache "$apt/cache" APT::Sandbox::User root >"$apt/apt.conf"
  export APT_CONFIG=$apt/apt.conf
  (apt-get update -qq && cd "$apt" && apt-get download -qq docker-compose docker-buildx) >&2
  for package in "$apt"/docker-*.deb; do dpkg --fsys-tarfile "$package" | tar -x -C "$apt" ./usr/libexec/docker/cli-plugins; done
  mkdir -p "$folder/cli-plugins"
  mv "$apt/usr/libexec/docker/cli-plugins/"* "$folder/cli-plugins/"
  rm -rf "$apt"
fi
echo "$folder"
