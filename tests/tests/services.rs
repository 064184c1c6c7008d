//! Services that a session keeps running, and the stand-ins for `systemctl`, `sudo` and `su` inside.

use dormouse_tests::{Server, Session, eventually};
use serde_json::{Value, json};

fn service(session: &Session, name: &str) -> Option<Value> {
    let list = session.client.get(&session.path("/services")).expect(200).json();
    list["items"].as_array().expect("a list").iter().find(|service| service["name"] == name).cloned()
}

#[track_caller]
fn until(session: &Session, name: &str, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    eventually(&format!("the service {name} is {what}"), || service(session, name).filter(|found| fits(found)))
}

fn pid(service: &Value) -> u64 {
    service["pid"].as_u64().expect("a running service has a pid")
}

fn output(session: &Session, name: &str) -> String {
    let path = session.path(&format!("/services/{name}/output?from=0"));
    let reply = session.client.send("GET", &path, &[("accept", "application/octet-stream")], None).expect("an answer");
    reply.expect(200).text()
}

/// Says its pid, then waits; ends as told by a file.
const WORKER: &str =
    "echo up $$; while :; do if [ -e /tmp/end ]; then code=$(cat /tmp/end); rm /tmp/end; exit $code; fi; sleep 0.05; done";

#[test]
fn services_run_as_declared_and_start_again_by_their_policy() {
    let server = Server::start();
    let once = |code: u8| json!(["sh", "-c", format!("echo ran; exit {code}")]);
    let session = server.session_with(&json!({ "services": [
        { "name": "web", "argv": ["sh", "-c", WORKER], "env": { "COLOUR": "blue" }, "cwd": "/var" },
        { "name": "good", "argv": once(0), "restart": "on_failure" },
        { "name": "bad", "argv": once(3), "restart": "on_failure" },
        { "name": "once", "argv": once(4), "restart": "never" },
        { "name": "missing", "argv": ["/nonexistent/program"], "restart": "never" },
    ] }));
    let web = until(&session, "web", "running", |s| s["state"] == "running");
    let environ = format!("tr '\\0' '\\n' < /proc/{}/environ | grep COLOUR; readlink /proc/{0}/cwd", pid(&web));
    assert_eq!(session.out(&environ), "COLOUR=blue\n/var");
    let declared = session.show();
    assert_eq!(declared["services"].as_array().map(Vec::len), Some(5), "{declared}");

    // Never: ran once, whatever its end. On failure: only a failure starts it again.
    let ended = until(&session, "once", "stopped", |s| s["state"] == "stopped");
    assert_eq!((&ended["exit_code"], &ended["restarts"]), (&json!(4), &json!(0)), "{ended}");
    let ended = until(&session, "good", "stopped", |s| s["state"] == "stopped");
    assert_eq!((&ended["exit_code"], &ended["restarts"]), (&json!(0), &json!(0)), "{ended}");
    until(&session, "bad", "started again", |s| s["restarts"].as_u64() >= Some(1));
    // What can't be started says so, and the others don't mind.
    let missing = until(&session, "missing", "not running", |s| s["state"] != "running" && s["state"] != "waiting");
    assert!(missing["pid"].is_null(), "{missing}");

    // Always: also after a good end, and after a kill.
    session.out("echo 0 > /tmp/end");
    let again = until(&session, "web", "another process", |s| s["state"] == "running" && pid(s) != pid(&web));
    session.out(&format!("kill -9 {}", pid(&again)));
    until(&session, "web", "a third process", |s| s["state"] == "running" && pid(s) != pid(&again));
    eventually("three starts are in the history", || {
        let events = session.events();
        let starts = events.iter().filter(|e| e["type"] == "service.started" && e["data"]["name"] == "web");
        (starts.count() >= 3).then_some(())
    });
    assert!(session.events().iter().any(|e| e["type"] == "service.ended" && e["data"]["name"] == "once"));
    server.delete_all_and_check();
}

#[test]
fn systemctl_inside_acts_on_the_declared_services() {
    let server = Server::start();
    let session = server.session_with(&json!({ "services": [{ "name": "web", "argv": ["sh", "-c", WORKER] }] }));
    let first = until(&session, "web", "running", |s| s["state"] == "running");
    let status = session.out("systemctl status web.service");
    assert!(status.contains("active") && status.contains(&pid(&first).to_string()), "{status}");
    assert_eq!(session.out("systemctl is-active web"), "active");

    session.out("systemctl restart web");
    let second = service(&session, "web").expect("it is there");
    assert_eq!(second["state"], "running");
    assert_ne!(pid(&first), pid(&second));

    session.out("systemctl stop web");
    assert_eq!(session.sh("systemctl status web").code, Some(3));
    assert_eq!(session.sh("systemctl is-active web").stdout.trim(), "inactive");
    assert_eq!(session.sh(&format!("kill -0 {}", pid(&second))).code, Some(1), "its process has ended");
    session.out("systemctl start web");
    assert_eq!(session.out("systemctl is-active web"), "active");

    let unknown = session.sh("systemctl start nginx");
    assert!(unknown.code != Some(0) && unknown.stderr.contains("nginx"), "{unknown:?}");
    assert_eq!(session.sh("systemctl status nginx").code, Some(4));
    // The same through the API.
    let stopped = session.client.post(&session.path("/services/web/stop"), &json!({})).expect(200).json();
    assert_eq!(stopped["state"], "stopped");
    session.client.post(&session.path("/services/nginx/stop"), &json!({})).expect(404);
    session.client.post(&session.path("/services/web/explode"), &json!({})).expect(404);
    server.delete_all_and_check();
}

#[test]
fn services_run_on_after_a_sleep_and_start_again_after_a_stop() {
    let server = Server::start();
    let counts = "echo begin $$; i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done";
    let session = server.session_with(&json!({ "services": [
        { "name": "count", "argv": ["sh", "-c", counts] }, { "name": "resting", "argv": ["sleep", "1000"] },
    ] }));
    let lines = || output(&session, "count").lines().map(str::to_owned).collect::<Vec<_>>();
    let before = eventually("it counts", || Some(lines()).filter(|l| l.len() > 3));
    let first = until(&session, "count", "running", |s| s["state"] == "running");
    session.hibernate();
    // Reading wakes nobody.
    assert_ne!(service(&session, "count").expect("it is declared")["state"], "running");
    let asleep = lines();
    assert!(asleep.len() >= before.len());
    assert_eq!(session.state(), "hibernated");
    session.wake();
    let after = eventually("it counts on", || Some(lines()).filter(|l| l.len() > asleep.len() + 3));
    let expected: Vec<String> = (1..after.len()).map(|n| n.to_string()).collect();
    assert_eq!(after[1..], expected, "the same process, every number once");
    assert_eq!(pid(&service(&session, "count").expect("it is there")), pid(&first));

    session.call("stop").expect(200);
    assert_eq!(service(&session, "count").expect("it is declared")["state"], "stopped");
    session.call("start").expect(200);
    until(&session, "count", "running", |s| s["state"] == "running");
    until(&session, "resting", "running", |s| s["state"] == "running");
    eventually("it begins anew, its old output kept", || {
        (output(&session, "count").lines().filter(|line| line.starts_with("begin")).count() == 2).then_some(())
    });

    // The log of all names it, and the CLI finds its output by its name.
    let log = session.client.get(&session.path("/logs")).expect(200).text();
    let entries: Vec<Value> = log.lines().filter(|l| !l.is_empty()).map(|l| serde_json::from_str(l).expect("JSON")).collect();
    assert!(entries.iter().any(|e| e["source"] == "service:count" && e["text"] == "1"), "{log}");
    let told = server.cli(&["logs", &session.id, "count"]).output().expect("the CLI runs");
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    assert!(String::from_utf8_lossy(&told.stdout).starts_with("begin "), "{}", String::from_utf8_lossy(&told.stdout));
    server.delete_all_and_check();
}

#[test]
fn the_set_of_services_can_be_changed() {
    let server = Server::start();
    let sleeper = |name: &str, seconds: &str| json!({ "name": name, "argv": ["sleep", seconds] });
    let session = server.session_with(&json!({ "services": [sleeper("a", "1000"), sleeper("b", "1000")] }));
    let a = until(&session, "a", "running", |s| s["state"] == "running");
    let b = until(&session, "b", "running", |s| s["state"] == "running");
    let set = |services: Value| session.client.patch(&session.path(""), &json!({ "services": services }));

    set(json!([sleeper("a", "1000"), sleeper("c", "1001")])).expect(200);
    until(&session, "c", "running", |s| s["state"] == "running");
    assert_eq!(pid(&service(&session, "a").expect("it stays")), pid(&a), "what did not change runs on");
    assert!(service(&session, "b").is_none());
    eventually("b has ended", || (session.sh(&format!("kill -0 {}", pid(&b))).code != Some(0)).then_some(()));

    set(json!([sleeper("a", "999")])).expect(200);
    let changed = until(&session, "a", "started anew", |s| s["state"] == "running" && pid(s) != pid(&a));
    assert_eq!(changed["argv"], json!(["sleep", "999"]));

    for (bad, field) in [
        (json!([{ "name": "x", "argv": [] }]), "services"),
        (json!([sleeper("x", "1"), sleeper("x", "2")]), "services"),
        (json!([{ "name": "a/b", "argv": ["true"] }]), ""),
        (json!([{ "name": "x", "argv": ["true"], "restart": "sometimes" }]), ""),
        (json!([{ "name": "x", "argv": ["true"], "colour": "red" }]), "colour"),
    ] {
        let refused = set(bad).expect(400);
        assert!(refused.text().contains(field), "{}", refused.text());
    }
    assert_eq!(pid(&service(&session, "a").expect("it is there")), pid(&changed), "a refused change changes nothing");

    // A stopped session starts what was declared meanwhile.
    session.call("stop").expect(200);
    set(json!([sleeper("d", "1002")])).expect(200);
    session.call("start").expect(200);
    until(&session, "d", "running", |s| s["state"] == "running");
    assert!(service(&session, "a").is_none());

    // A sleeping session has the new set when it wakes.
    session.hibernate();
    set(json!([sleeper("e", "1003")])).expect(200);
    assert_eq!(session.state(), "hibernated", "a change of the declaration wakes nobody");
    session.wake();
    until(&session, "e", "running", |s| s["state"] == "running");
    eventually("the old one has ended", || service(&session, "d").is_none().then_some(()));
    eventually("its process, too", || (session.sh("pgrep -x -f 'sleep 1002'").code == Some(1)).then_some(()));
    server.delete_all_and_check();
}

#[test]
fn sudo_and_su_change_the_user_inside() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(session.out("sudo -u nobody id -un"), "nobody");
    assert_eq!(session.out("su -s /bin/sh nobody -c 'id -un'"), "nobody");
    let as_nobody = |shell: &str| session.exec_with(&json!({ "shell": shell, "user": "nobody", "cwd": "/" }));
    assert_eq!(as_nobody("id -un").stdout, "nobody\n");
    assert_eq!(as_nobody("sudo id -u").stdout, "0\n");
    assert_eq!(as_nobody("sudo sh -c 'id -un; id -gn; echo $HOME'").stdout, "root\nroot\n/root\n");
    assert_eq!(as_nobody("su -c 'id -un'").stdout, "root\n");
    assert_eq!(as_nobody("echo text | sudo tee /root/written; sudo cat /root/written").stdout, "text\ntext\n");
    // Ends as the program ended, its signals passed on.
    assert_eq!(as_nobody("sudo sh -c 'exit 7'").code, Some(7));
    assert_eq!(as_nobody("sudo sh -c 'kill -9 $$'").code, Some(137));
    assert_eq!(as_nobody("sudo no-such-program").code, Some(127));
    let unknown = session.sh("sudo -u who-is-that id");
    assert!(unknown.code == Some(1) && unknown.stderr.contains("who-is-that"), "{unknown:?}");
    server.delete_all_and_check();
}
