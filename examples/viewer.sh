#!/bin/sh
# A viewer that comes back from another device: prints what an exec has printed since an offset, and the offset to go on
# from on standard error.
#
#   viewer.sh SESSION-ID EXEC-ID [OFFSET]
#
# Needs curl. DORMOUSE_URL and DORMOUSE_TOKEN name the server.
set -eu
session=$1 exec=$2 offset=${3:-0}
url=${DORMOUSE_URL:-http://127.0.0.1:7420}
part=$(mktemp)
trap 'rm -f "$part"' EXIT

# Raw bytes by offset: the same bytes at the same offsets for everybody, for as long as they are kept.
curl --silent --show-error --fail-with-body --retry 10 --retry-connrefused --retry-delay 1 --output "$part" \
    --header "Authorization: Bearer $DORMOUSE_TOKEN" --header 'Accept: application/octet-stream' \
    "$url/v1/sessions/$session/execs/$exec/output?stream=stdout&from=$offset"
cat "$part"
echo $((offset + $(wc -c <"$part"))) >&2
