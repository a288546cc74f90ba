#!/usr/bin/env bash
# On the borrowed machine: collect the pieces that a call brought, and unpack them to /tmp/gpukit/site
# once all are there. Does nothing where that is done. Fails on a machine that has not all pieces.
set -euo pipefail
cd "$(dirname "$0")/../.."
kit=/tmp/gpukit
mkdir -p $kit/pieces
if [ -f .gpukit/sums ]; then
  cp .gpukit/sums $kit/pieces/
  for piece in .gpukit/piece-*; do if [ -f "$piece" ]; then cp "$piece" $kit/pieces/; fi; done
fi
cd $kit/pieces
if [ ! -f sums ]; then
  echo "this machine is a fresh one: send the same command with carry [\".gpukit\"]" >&2
  exit 1
fi
if cmp --silent sums $kit/complete; then exit 0; fi
if ! sha256sum --check --quiet sums; then
  echo "not all pieces are here: $(ls | tr '\n' ' ')" >&2
  exit 1
fi
# Python reads xz wherever it runs; the machine may lack the program.
mkdir -p $kit/site
awk '{ print $2 }' sums | xargs cat | "${PYTHON:-python3}" -c '
import lzma, sys, tarfile
with tarfile.open(fileobj=lzma.open(sys.stdin.buffer), mode="r|", bufsize=2**20) as archive:
    archive.extractall("/tmp/gpukit/site", filter="fully_trusted")
'
cp sums $kit/complete
echo "unpacked: $(du -sm $kit/site | cut -f 1) MiB"
