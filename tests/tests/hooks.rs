//! Hooks: commands of the session at moments of its life, and that none of them stands in the way.

use dormouse_tests::{Server, eventually};
use serde_json::json;

#[test]
fn hooks_run_at_their_moments_and_their_output_is_kept() {
    let server = Server::start();
    let session = server.session_with(&json!({ "hooks": {
        "on_create": ["sh", "-c", "echo created >> /root/hooks; echo said"],
        "before_hibernate": "echo before_hibernate >> /root/hooks",
        "on_wake": "echo on_wake $DORMOUSE_GENERATION >> /root/hooks; test ${DORMOUSE_GAP_SECONDS%.*} -ge 0",
        "before_stop": "echo before_stop >> /root/hooks",
    } }));
    let created = session.event("hook.ended");
    assert_eq!((&created["data"]["hook"], &created["data"]["exit_code"]), (&json!("on_create"), &json!(0)), "{created}");
    let exec = created["data"]["exec_id"].as_str().expect("an exec").to_owned();
    assert_eq!(session.output(&exec, "stdout"), b"said\n");
    session.hibernate();
    let woken = session.client.post(&session.path("/wake?wait_for_hooks=true"), &json!({})).expect(200).json();
    assert_eq!(woken["generation"], 2);
    assert_eq!(session.out("cat /root/hooks"), "created\nbefore_hibernate\non_wake 2");
    session.call("stop").expect(200);
    session.call("start").expect(200);
    assert_eq!(session.out("cat /root/hooks"), "created\nbefore_hibernate\non_wake 2\nbefore_stop");
    server.delete_all_and_check();
}

#[test]
fn a_hook_that_fails_or_hangs_stops_nothing() {
    let server = Server::start();
    let session = server.session_with(&json!({ "hooks": {
        "on_create": ["/no/such/program"],
        "before_hibernate": "exit 3",
        "on_wake": "trap '' TERM; sleep 1000",
    } }));
    let failed = session.event("hook.ended");
    assert_eq!(failed["data"]["exit_code"], 127, "{failed}");
    session.hibernate();
    assert_eq!(session.event("hook.ended")["data"]["exit_code"], 3);
    // Callers aren't kept waiting by the one that hangs.
    assert_eq!(session.out("echo in"), "in");
    let ended = eventually("it is ended after its time", || {
        session.events().into_iter().rev().find(|event| event["data"]["hook"] == "on_wake" && event["type"] == "hook.ended")
    });
    assert_eq!((&ended["data"]["state"], &ended["data"]["reason"]), (&json!("timed_out"), &json!("timeout")), "{ended}");
    server.delete_all_and_check();
}
