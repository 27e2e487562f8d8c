#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Counts the instructions per request of the shim and of the baseline with
# callgrind, which do not depend on what else the machine does.
#
#   benches/instructions.sh <memfabric_bench> [folder for the profiles]
#
# Each profile can be read with callgrind_annotate.
set -euo pipefail
if [[ $# -lt 1 || $# -gt 2 || ! -x $1 ]]; then
    echo "usage: $0 <memfabric_bench> [folder for the profiles]" >&2
    exit 2
fi
if ! command -v valgrind >/dev/null; then
    echo "$0: valgrind is not installed" >&2
    exit 2
fi
folder=${2:-$(mktemp -d)}
mkdir -p "$folder"
rm -f "$folder"/callgrind.out*
# The program's own log goes to a file: it is not measured.
if ! valgrind --tool=callgrind --compress-strings=no --callgrind-out-file="$folder/callgrind.out" \
    "$1" --instructions >"$folder/log" 2>&1; then
    cat "$folder/log" >&2
    exit 1
fi

echo "instructions per request (metadata: TENT's own look-up of the peers)"
printf '%-38s %9s %9s %9s %6s\n' '' baseline shim metadata ratio
# A profile is of one side in one case: "Client Request: <requests> <side>: <case>".
find "$folder" -name 'callgrind.out.*' | sort -V | xargs awk '
    /^desc: Trigger: Client Request: / {
        requests = $5
        side = $6
        sub(/:$/, "", side)
        name = $0
        sub(/^[^:]*: [^:]*: [^:]*: [^:]*: /, "", name)
    }
    /^summary: / {
        per_request[side] = $2 / requests
        if (side == "metadata") {
            printf "%-38s %9.1f %9.1f %9.1f %6.2f\n", name,
                per_request["baseline"], per_request["shim"],
                per_request["metadata"],
                per_request["shim"] / per_request["baseline"]
        }
    }'
echo "profiles: $folder"
