#!/bin/sh
# Reconnects to a session and says how it was found and how long it has left, without moving any of its clocks.
#
#   countdown.sh SESSION-ID
#
# Needs curl and python3 (to read JSON). DORMOUSE_URL and DORMOUSE_TOKEN name the server.
set -eu
url=${DORMOUSE_URL:-http://127.0.0.1:7420}

# A look: nothing is woken for it. Once the user wants to go on, the same call without "wake": false brings it back.
curl --silent --show-error --fail-with-body --retry 10 --retry-connrefused --retry-delay 1 \
    --header "Authorization: Bearer $DORMOUSE_TOKEN" --header 'Content-Type: application/json' \
    --data '{"wake": false}' "$url/v1/sessions/$1/connect" |
    python3 -c '
import datetime, json, sys

answer = json.load(sys.stdin)
clock = answer["lifecycle"]
# By the server'"'"'s clock on both sides: the one of this machine may be off.
moment = lambda name: clock[name] and datetime.datetime.fromisoformat(clock[name].replace("Z", "+00:00"))
print(answer["status"])
for name in ("hibernate_after", "timeout_at", "expires_at"):
    if moment(name):
        print(name, round((moment(name) - moment("server_time")).total_seconds()), "s")
for way in answer["restore_options"]:
    print("way back:", way["action"], "with memory" if way["memory"] else "without memory")
'
