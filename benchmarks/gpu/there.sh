#!/usr/bin/env bash
# On a bare machine with torch: installs what pack.py has packed, without touching what is there, builds the kernels, and
# runs the command with these arguments. `PYTHON` names the interpreter that has torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target .gpu/site .gpu/wheels/*.whl
here=$PWD
for folder in protos common server worker simulator deploy benchmarks .gpu/site; do
  path=${path:+$path:}$here/$folder
done
# In front of the machine's own: grpcio and protobuf must be those that were packed.
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
"$python" -m diloco_common.codec --build || echo "gpu: no C compiler: torch does the kernels' work" >&2
exec "$python" benchmarks/gpu "$@"
