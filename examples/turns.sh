#!/bin/sh
# An orchestrator that may crash at any moment: one call at the top of each turn finds the session again, or makes it.
#
#   turns.sh KEY COMMAND      runs COMMAND in the session of this key, as its next turn
#
# Needs curl and python3 (to read JSON). DORMOUSE_URL and DORMOUSE_TOKEN name the server.
set -eu
key=$1 command=$2
url=${DORMOUSE_URL:-http://127.0.0.1:7420}

call() { # METHOD PATH [BODY [IDEMPOTENCY-KEY]]
    curl --silent --show-error --fail-with-body --retry 10 --retry-connrefused --retry-delay 1 \
        --request "$1" --header "Authorization: Bearer $DORMOUSE_TOKEN" --header 'Content-Type: application/json' \
        ${4:+--header "Idempotency-Key: $4"} ${3:+--data "$3"} "$url$2"
}
field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
quote() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$1"; }

# Get or create: the same key gives the same session, from any number of callers, through any crash.
id=$(call POST /v1/sessions "{\"key\": $(quote "$key"), \"idle\": {\"after_seconds\": 600, \"action\": \"hibernate\"}}" | field id)

# The turn's number counts inside the session, so that an orchestrator without a memory of its own needs none.
turn=$(call POST "/v1/sessions/$id/execs?wait=true" '{"shell": "cat turn 2>/dev/null || echo 1"}' | field stdout | tr -d '\n')

# "Run this once": whoever crashes here and comes back asks with the same key, and gets the first run's result.
call POST "/v1/sessions/$id/execs?wait=true" "{\"shell\": $(quote "$command"), \"key\": \"turn-$turn\"}" | field stdout
call POST "/v1/sessions/$id/execs?wait=true" "{\"shell\": \"echo $((turn + 1)) > turn\", \"key\": \"turn-$turn-done\"}" >/dev/null
echo "session $id, turn $turn" >&2
