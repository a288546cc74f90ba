#!/usr/bin/env bash
# All GPU checks in order of value, on a borrowed GPU. Run it again, and it goes on where it stopped.
#
#   benchmarks/gpu/check.sh                      # on a GPU: at most 10 minutes a call, 22 in all
#   benchmarks/gpu/check.sh --device cpu --size tiny
#
# Needs torch, transformers and pydantic; wheels in .whl/ are installed into a folder of their own.
# The report is gpu-check.md and gpu-check.json in $OUT, or in out/gpu-check. See docs/gpu-check.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
if compgen -G '.whl/*.whl' > /dev/null; then
  site="$PWD/.gpu-check/site"
  [ -d "$site" ] || "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" .whl/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
exec "$python" -m benchmarks.gpu.check "$@"
