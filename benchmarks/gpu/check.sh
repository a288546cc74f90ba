#!/usr/bin/env bash
# All GPU checks in order of value. Run it again, and it goes on where it stopped.
#
#   benchmarks/gpu/check.sh                              # on a GPU: at most 10 minutes a call
#   benchmarks/gpu/check.sh --only predictions --minutes 30   # how wrong predictions are on this GPU
#   benchmarks/gpu/check.sh --device cpu --size tiny     # tries all checks without a GPU
#   benchmarks/gpu/check.sh --help
#
# What a check needs and the machine lacks, it says, and the others run. Wheels in .whl/ are installed
# into a folder of their own. With --kit as the first argument, everything comes from the archive of
# pack.sh: see README.md. The report is gpu-check.md and gpu-check.json in $OUT, or in out/gpu-check.
# Exit codes: 1 if a check has failed, 3 if checks are left for another call.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
options=()
if [ "${1:-}" = --kit ]; then
  shift
  bash benchmarks/gpu/unpack.sh || exit 9
  export PYTHONPATH="/tmp/gpukit/site${PYTHONPATH:+:$PYTHONPATH}"
  export APAR_CHECK_MODEL=/tmp/gpukit/site/apar-7b
  export VLLM_CACHE_ROOT=/tmp/cache/vllm TRITON_CACHE_DIR=/tmp/cache/triton
  export TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor
  # The machine has no network.
  export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
  options=(--answers /tmp/gpukit/site/structured.jsonl)
  if [ -f .gpukit/gpu-check.json ]; then options+=(--resume .gpukit/gpu-check.json); fi
fi
if compgen -G '.whl/*.whl' > /dev/null; then
  site="$PWD/.gpu-check/site"
  if [ ! -d "$site" ]; then
    rm -rf "$site.new"
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site.new" .whl/*.whl
    mv "$site.new" "$site"
  fi
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
exec "$python" -m benchmarks.gpu.check "${options[@]}" "$@"
