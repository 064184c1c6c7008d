#!/usr/bin/env python3
"""An orchestrator that may crash at any moment: one call at the top of each turn finds the session again, or makes it.

    turns.py KEY COMMAND      runs COMMAND in the session of this key, as its next turn

Nothing but the standard library. DORMOUSE_URL and DORMOUSE_TOKEN name the server.
"""
import json
import os
import sys
import time
import urllib.error
import urllib.request

URL = os.environ.get("DORMOUSE_URL", "http://127.0.0.1:7420")


def call(method, path, body=None):
    """One request; a server that is away or says `retryable` is asked again."""
    headers = {"Authorization": "Bearer " + os.environ["DORMOUSE_TOKEN"], "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    for attempt in range(20):
        try:
            with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers, method=method)) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            problem = json.load(error)
            if not problem.get("retryable"):
                sys.exit(f"{problem['code']}: {problem['detail']}")
            time.sleep(problem.get("retry_after_seconds", 1))
        except (urllib.error.URLError, ConnectionError):
            # The server is restarting; the session doesn't mind.
            time.sleep(min(0.1 * 2**attempt, 2))
    sys.exit("the server does not come back")


def main(key, command):
    # Get or create: the same key gives the same session, from any number of callers, through any crash.
    session = call("POST", "/v1/sessions", {"key": key, "idle": {"after_seconds": 600, "action": "hibernate"}})
    execs = f"/v1/sessions/{session['id']}/execs?wait=true"
    # The turn's number counts inside the session, so that an orchestrator without a memory of its own needs none.
    turn = int(call("POST", execs, {"shell": "cat turn 2>/dev/null || echo 1"})["stdout"])
    # "Run this once": whoever crashes here and comes back asks with the same key, and gets the first run's result.
    exec = call("POST", execs, {"shell": command, "key": f"turn-{turn}"})
    print(exec["stdout"], end="")
    call("POST", execs, {"shell": f"echo {turn + 1} > turn", "key": f"turn-{turn}-done"})
    print(f"session {session['id']}, turn {turn}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
