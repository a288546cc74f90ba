#!/bin/sh
# Pin every image of another project to the digest that its tag has now, and the CPU build of torch to its hashes. Needs a
# network, docker with buildx, and curl. Run from the repository's root (`make pin`), review the changes, and commit them. Tags
# stay beside the digests, so that running it again after a new tag pins that one.
set -eu
files=$(grep -rlE '^ *(FROM|-? *image:) ' containers/Dockerfile.* k8s --include=Dockerfile.* --include=*.yaml; echo compose.yaml)
# shellcheck disable=SC2086 # several files
images=$(sed -nE 's/^ *(FROM|-? *image:) +([^ @]+:[^ @]+).*/\2/p' $files | sort -u)
for image in $images; do
    case $image in apar-serve:*) continue ;; esac
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image")
    case $digest in
        sha256:*) ;;
        *) echo "no digest of $image: $digest" >&2; exit 1 ;;
    esac
    echo "$image@$digest"
    # shellcheck disable=SC2086
    sed -i -E "s#^( *(FROM|-? *image:) +)$image(@sha256:[0-9a-f]+)?( |\$)#\\1$image@$digest\\4#" $files
done
# PyTorch's index names the hash of each file.
torch=requirements/torch-cpu.txt
version=$(sed -nE 's/^torch==([^ +]+)\+cpu.*/\1/p' $torch)
hashes=$(curl -fsS "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}/torch/" |
    sed -nE "s/.*torch-$version(%2B|\\+)cpu-[^#\"]*\\.whl#sha256=([0-9a-f]{64}).*/\\2/p" | sort -u)
[ -n "$hashes" ] || { echo "the index has no hashes of torch==$version+cpu" >&2; exit 1; }
{
    grep '^#' $torch
    printf 'torch==%s+cpu' "$version"
    # shellcheck disable=SC2086 # one line each
    printf ' \\\n    --hash=sha256:%s' $hashes
    echo
} >$torch.new
mv $torch.new $torch
