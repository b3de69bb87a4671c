#!/usr/bin/env bash
# What tests/e2e/test_compose.py needs: a Docker engine with docker-compose, and the images to start from.
#
#   source tests/e2e/engine.sh && start_engine     1 if there is none and none can be started here; says why
#   stop_engine                                    ends the engine if it was started here
#
# An engine that answers is used as it is. As root on Debian or Ubuntu, a missing one is installed and started, and so are
# docker-compose 1.29 and Compose v2: the test uses each that is there. Exports DOCKER_CONFIG where Compose v2 had to be
# fetched; BASE_IMAGE, PROMETHEUS_IMAGE and BUILD_NETWORK where the images had to be made.

start_engine() {
  if ! docker info >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "no Docker engine answers, and installing one takes root and apt" >&2; return 1; }
    _install dockerd:docker.io iptables:iptables ip:iproute2 || return 1
    mkdir -p .cache
    # In a session of its own, so that Ctrl-C at the test does not end the engine before the containers.
    setsid nohup dockerd >.cache/dockerd.log 2>&1 &
    engine_pid=$!
    for _ in $(seq 60); do
      docker info >/dev/null 2>&1 && break
      kill -0 "$engine_pid" 2>/dev/null || break
      sleep 1
    done
    docker info >/dev/null 2>&1 || { echo "dockerd does not start here:" >&2; tail -n 3 .cache/dockerd.log >&2; stop_engine; return 1; }
  fi
  _composes || return 1
  _images || return 1
  docker run --rm --network none "${BASE_IMAGE:-$(_named BASE_IMAGE)}" true >/dev/null 2>&1 \
    || { echo "the engine answers, but containers do not run on it here" >&2; return 1; }
}

stop_engine() {
  [ -n "${engine_pid:-}" ] || return 0
  kill "$engine_pid" 2>/dev/null && wait "$engine_pid" 2>/dev/null
  engine_pid=
}

# Install the packages of the commands that are missing: command:package ...
_install() {
  local missing=() pair
  for pair in "$@"; do command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}"); done
  [ ${#missing[@]} = 0 ] && return
  mkdir -p .cache
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"; } \
    >.cache/engine-install.log 2>&1 || { echo "cannot install ${missing[*]}: $(tail -n 1 .cache/engine-install.log)" >&2; return 1; }
}

_composes() {
  if ! docker compose version >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    local config
    mkdir -p .cache
    config=$(tests/e2e/compose_v2.sh 2>.cache/compose-v2-install.log) && DOCKER_CONFIG=$config docker compose version >/dev/null 2>&1 \
      && export DOCKER_CONFIG=$config || echo "Compose v2 cannot be had here, see .cache/compose-v2-install.log" >&2
  fi
  command -v docker-compose >/dev/null || { [ "$(id -u)" = 0 ] && _install docker-compose:docker-compose; } \
    || docker compose version >/dev/null 2>&1 || { echo "there is neither Compose v2 nor docker-compose" >&2; return 1; }
}

# From a registry of images if one can be reached, else made of Debian's packages, with the torch that pip finds here.
_images() {
  local image=${PROMETHEUS_IMAGE:-$(_named PROMETHEUS_IMAGE)} given
  if _have "${BASE_IMAGE:-$(_named BASE_IMAGE)}" && _have "$image"; then return; fi
  [ "$(id -u)" = 0 ] && _install debootstrap:debootstrap || { echo "no image registry, and no debootstrap" >&2; return 1; }
  given=$(tests/e2e/offline_images.sh) || { echo "the images cannot be made here" >&2; return 1; }
  export $given BUILD_NETWORK=host
  ls deploy/wheels/torch-*.whl >/dev/null 2>&1 \
    || ${PYTHON:-.venv/bin/python} -m pip --disable-pip-version-check download -q --no-deps -d deploy/wheels "$(grep -o '^torch==[^ ]*' requirements/torch.txt)"
}

# The image that docker-compose.yml takes unless a variable says otherwise.
_named() { sed -n "s/.*{$1:-\([^}]*\)}.*/\1/p" docker-compose.yml; }
_have() { docker image inspect "$1" >/dev/null 2>&1 || timeout 60 docker pull -q "$1" >/dev/null 2>&1; }
