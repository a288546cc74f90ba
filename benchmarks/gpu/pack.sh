#!/usr/bin/env bash
# Pack what a borrowed GPU machine without a network lacks: benchmarks/gpu/pack.sh [TRACE]
#
# Writes .gpukit, which git ignores: an archive in pieces that each fit into a call beside the
# checkout. It has vLLM and the packages of packages.txt, at the versions and hashes of
# requirements/gpu.txt, a checkpoint's folder with the dimensions of apar-7b and no weights, and the
# recorded answers of TRACE (default: those in ../shared). README.md has the rest.
#
# Needs .venv (for the tokenizer), strip and xz. 370 MB are downloaded; WORK keeps them. WHOLE=1
# leaves vLLM's libraries as they are, in case slim.py is at fault: three times as many pieces.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD/benchmarks/gpu
work=${WORK:-${TMPDIR:-/tmp}/gpukit-work}
answers=$(realpath -e "${1:-../shared/data/traces/structured.jsonl}" 2>/dev/null) ||
  { echo "no recorded answers: benchmarks/gpu/pack.sh TRACE.jsonl" >&2; exit 2; }
python=${PYTHON:-$PWD/.venv/bin/python}
site=$work/site out=$PWD/.gpukit
for_gpu=(--quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all:
  --implementation cp --python-version 3.12)

mkdir -p "$work"
rm -rf "$site"
xargs "$here/pinned.sh" <"$here/packages.txt" >"$work/packages.txt"
"$python" -m pip install "${for_gpu[@]}" --no-compile --target "$site" --requirement "$work/packages.txt"
# The scripts of packages name an interpreter of this machine.
rm -rf "$site/bin"

"$here/pinned.sh" vllm >"$work/vllm.txt"
ls "$work"/vllm-*.whl >/dev/null 2>&1 ||
  "$python" -m pip download "${for_gpu[@]}" --dest "$work" --requirement "$work/vllm.txt"
"$python" -m zipfile --extract "$work"/vllm-*.whl "$site"
PYTHONPATH=. "$python" -c 'import sys, pathlib
from cluster.lab.experiments.engine import write_random_model
write_random_model("apar-7b", pathlib.Path(sys.argv[1]))' "$site/apar-7b"
cp "$answers" "$site/structured.jsonl"
(
  cd "$site/vllm"
  # DeepGEMM and MSA are for other models and GPUs; the rest is headers, and another front end.
  rm -rf vllm-rs third_party/deep_gemm third_party/fmha_sm100
  libraries=(_C_stable_libtorch.abi3.so vllm_flash_attn/_vllm_fa3_C.abi3.so
    cumem_allocator.abi3.so fs_io_C.abi3.so spinloop.abi3.so)
  for library in $(find . -name '*.so' -printf '%P '); do
    [[ " ${libraries[*]} " == *" $library "* ]] || rm "$library"
  done
  if [ -z "${WHOLE:-}" ]; then
    "$python" "$here/slim.py" "${libraries[0]}" "${libraries[0]}"
    # Heads of 64 and 128 elements in bf16; apar-tiny's heads of 32 run as 64.
    "$python" "$here/slim.py" "${libraries[1]}" "${libraries[1]}" \
      --only flash_fwd_hdim128_bf16 flash_fwd_hdim64_bf16 flash_fwd_combine flash_prepare_scheduler
    strip --strip-all "${libraries[@]}"
  fi
)
rm -rf "$out"
mkdir "$out"
# A call carries 64 MiB: the files of the checkout, and a piece. Two are left for headers.
tree=$(git ls-files -z --cached --others --exclude-standard | (xargs -0 stat --format %s 2>/dev/null || true) |
  awk '{ sum += $1 } END { print sum }')
room=$((62 * 2 ** 20 - tree))
tar --create --directory "$site" --sort name --owner 0 --group 0 . | xz -9 |
  split --bytes "${PIECE:-$room}" --numeric-suffixes --suffix-length 1 - "$out/piece-"
(cd "$out" && sha256sum piece-* >sums)
git rev-parse --short HEAD >"$out/commit"
echo "checkout: $((tree / 2 ** 20)) MiB; pieces:"
ls -l "$out"/piece-*
