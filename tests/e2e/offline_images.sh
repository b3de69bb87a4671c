#!/usr/bin/env bash
# Make the two images that deployment starts from, where no image registry can be reached: Debian's own Python instead of
# python:3.11-slim, Debian's own Prometheus instead of prom/prometheus. For tests; a tag that is there stays as it is.
#
#   sudo tests/e2e/offline_images.sh [FOLDER]      prints the variables that docker-compose.yml reads: NAME=IMAGE ...
#
# Needs root, a Docker engine, debootstrap, and whatever mirror apt uses on this machine. FOLDER (.cache/images) holds
# the downloaded system, so that a second run has nothing to download.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-$PWD/.cache/images}
suite=${DEBIAN_SUITE:-bookworm}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

have() { docker image inspect "$1" >/dev/null 2>&1; }
as_image() { tar -C "$1" --exclude=./proc/* --exclude=./sys/* --exclude=./var/lib/apt/lists/* --exclude=./var/cache/apt/* -c . | docker import "${@:3}" - "$2" >/dev/null; }

# Like the official image, it has pip and setuptools under /usr/local, which ours have to get rid of.
system=$folder/$suite
if [ ! -e "$system.done" ]; then
  rm -rf "$system"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$system" >"$folder/debootstrap.log" 2>&1 \
    || { tail -n 5 "$folder/debootstrap.log" >&2; exit 1; }
  ln -sf python3 "$system/usr/bin/python"
  chroot "$system" sh -c 'wheels=/usr/share/python-wheels; exec env PIP_FIND_LINKS=$wheels PIP_NO_INDEX=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 "$(echo $wheels/pip-*.whl)/pip" install -q pip setuptools'
  touch "$system.done"
fi
# What this machine trusts and how it reaches its mirror holds for images that are built on it as well.
cp -L /etc/ssl/certs/ca-certificates.crt "$system/etc/ssl/certs/ca-certificates.crt"
base=decoupled-diloco/base:$suite
have "$base" || as_image "$system" "$base" \
  --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' --change 'CMD ["python3"]'

# The package alone: its programs are static but for the C library, which the base has.
if [ ! -e "$folder/prometheus.done" ]; then
  rm -rf "$folder/prometheus" && mkdir -p "$folder/prometheus"
  (cd "$folder" && rm -f prometheus_*.deb && apt-get download -qq -o APT::Sandbox::User=root prometheus >"$folder/apt.log" 2>&1) \
    || (cd "$folder" && apt-get update -qq && apt-get download -qq -o APT::Sandbox::User=root prometheus)
  dpkg --fsys-tarfile "$folder"/prometheus_*.deb | tar -x -C "$folder/prometheus" ./usr/bin
  mkdir "$folder/prometheus/bin" && mv "$folder/prometheus/usr/bin/"* "$folder/prometheus/bin/"
  touch "$folder/prometheus.done"
fi
version=$("$folder/prometheus/bin/prometheus" --version 2>&1 | sed -n 's/^prometheus, version \([0-9.]*\).*/\1/p')
prometheus=decoupled-diloco/prometheus:v$version
if ! have "$prometheus"; then
  printf '%s\n' "FROM $base" 'COPY bin/prometheus bin/promtool /bin/' \
    'RUN install -d -o nobody -g nogroup /prometheus' 'USER nobody' 'WORKDIR /prometheus' 'VOLUME /prometheus' \
    'EXPOSE 9090' 'ENTRYPOINT ["/bin/prometheus"]' >"$folder/prometheus/Dockerfile"
  DOCKER_BUILDKIT=0 docker build -q -t "$prometheus" "$folder/prometheus" >/dev/null
fi
echo "BASE_IMAGE=$base"
echo "PROMETHEUS_IMAGE=$prometheus"
