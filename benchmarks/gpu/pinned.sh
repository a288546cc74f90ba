#!/usr/bin/env bash
# Print the lines of requirements/gpu.txt for some packages, with versions and hashes:
#
#   benchmarks/gpu/pinned.sh pydantic pydantic-core > requirements.txt
set -euo pipefail
cd "$(dirname "$0")/../.."
awk 'BEGIN { for (i = 1; i < ARGC; i++) { wanted[ARGV[i]] = 1; ARGV[i] = "" } ARGV[1] = "requirements/gpu.txt" }
    /^[A-Za-z0-9]/ { split($0, name, "=="); keep = name[1] in wanted; delete missing[name[1]] }
    keep' "$@"
for name in "$@"; do
  grep --quiet "^$name==" requirements/gpu.txt || { echo "requirements/gpu.txt has no $name" >&2; exit 1; }
done
