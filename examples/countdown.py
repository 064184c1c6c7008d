#!/usr/bin/env python3
"""Reconnects to a session, says how it was found and how long it has left, and goes on with it where it can.

    countdown.py SESSION-ID [--wake]

Nothing but the standard library. DORMOUSE_URL and DORMOUSE_TOKEN name the server.
"""
import datetime
import json
import os
import sys
import urllib.request

URL = os.environ.get("DORMOUSE_URL", "http://127.0.0.1:7420")


def connect(session, wake):
    """The one question of a client that comes back. `wake=False` starts nothing and moves no clock."""
    headers = {"Authorization": "Bearer " + os.environ["DORMOUSE_TOKEN"], "Content-Type": "application/json"}
    body = json.dumps({"wake": wake}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/v1/sessions/{session}/connect", body, headers)) as answer:
        return json.load(answer)


def seconds_left(lifecycle, name):
    """By the server's clock on both sides: this machine's may be off. None where there is no such limit."""
    if lifecycle[name] is None:
        return None
    at, now = (datetime.datetime.fromisoformat(lifecycle[field].replace("Z", "+00:00")) for field in (name, "server_time"))
    return (at - now).total_seconds()


def main(session, *flags):
    answer = connect(session, "--wake" in flags)
    print(answer["status"])
    for name in ("hibernate_after", "timeout_at", "expires_at"):
        left = seconds_left(answer["lifecycle"], name)
        if left is not None:
            print(f"{name} {left:.0f} s")
    if answer["woken"]:
        wake = answer.get("wake")
        print(f"slept {wake['gap_seconds']:.1f} s, memory {wake['memory']}" if wake else "started again")
    for way in answer["restore_options"]:
        print("way back:", way["action"], "with memory" if way["memory"] else "without memory")
    for exec in answer["execs"]:
        print("exec", exec["id"], exec["state"], "go on reading from", exec["stdout_bytes"])


if __name__ == "__main__":
    main(*sys.argv[1:])
