//! The main job in one go: work, server killed, hibernated, woken; the output goes on.

use dormouse_tests::{Server, eventually};

#[test]
fn output_goes_on_through_a_crash_and_a_sleep() {
    let mut server = Server::start();
    let session = server.session();
    assert_eq!(session.out("echo hello; cat /etc/hostname | wc -l"), "hello\n1");
    let counter = session.start_sh("i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done");
    let lines = |bytes: Vec<u8>| String::from_utf8(bytes).expect("digits").lines().map(str::to_owned).collect::<Vec<_>>();
    eventually("it counts", || Some(lines(session.output(&counter, "stdout"))).filter(|l| l.len() > 5));

    server.crash();
    let session = session.on(&server.client);
    assert_eq!(session.state(), "running");
    session.hibernate();
    assert_eq!(session.show()["memory"], "saved");
    let asleep = lines(session.output(&counter, "stdout")).len();
    session.wake();
    let all = eventually("it counts on", || Some(lines(session.output(&counter, "stdout"))).filter(|l| l.len() > asleep + 5));
    let expected: Vec<String> = (1..=all.len()).map(|n| n.to_string()).collect();
    assert_eq!(all, expected, "every number exactly once");
    assert_eq!(session.show()["generation"], 2);
    server.delete_all_and_check();
}
