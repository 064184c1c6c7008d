//! Sandboxes that are kept ready: claimed ones have nothing in common, and none outlives what it was for.

use dormouse_tests::{Options, Server, Session, eventually, http::Client, leftovers};
use serde_json::json;
use std::{collections::HashSet, path::Path, thread};

const POOL: u32 = 2;

fn server() -> Server {
    Server::with(Options { pool: POOL, ..Options::default() })
}

/// Ids in the command lines of the living supervisors of a data directory.
fn supervised(data: &Path) -> HashSet<String> {
    let lines = leftovers::processes(data).into_iter().map(|(_, line)| line).filter(|line| line.contains("supervise"));
    let ids = lines.filter_map(|line| Some(line.split("/sessions/").nth(1)?.split('/').next()?.to_owned()));
    ids.collect()
}

/// Waits until the pool is full and nothing else is alive; answers the ids of those in it.
#[track_caller]
fn full_pool(data: &Path) -> HashSet<String> {
    eventually("the pool is full", || {
        let dirs: HashSet<String> = leftovers::directories(data).into_iter().collect();
        (dirs.len() == POOL as usize && supervised(data) == dirs).then_some(dirs)
    })
}

fn create(client: &Client) -> Session {
    let made = client.post("/v1/sessions", &json!({})).expect(201).json();
    Session::new(client.clone(), &made)
}

/// Waits until nothing of these sessions is left: processes, mounts, control groups, directories.
#[track_caller]
fn nothing_left_of(data: &Path, ids: &HashSet<String>) {
    eventually("nothing is left of the deleted sessions", || {
        let named = |text: &str| ids.iter().any(|id| text.contains(id.as_str()));
        let list: Vec<String> = ids.iter().cloned().collect();
        let none = !leftovers::processes(data).iter().any(|(_, line)| named(line))
            && !leftovers::mounts(data).iter().any(|at| named(&at.to_string_lossy()))
            && !leftovers::directories(data).iter().any(|dir| named(dir))
            && leftovers::cgroups(&list).is_empty();
        none.then_some(())
    });
}

#[test]
fn sixty_sessions_created_at_once_have_nothing_in_common_and_leave_nothing_behind() {
    let _alone = alone();
    let mut server = server();
    let rounds = if dormouse_tests::long() { 10 } else { 1 };
    let mut seen = HashSet::new();
    for round in 1..=rounds {
        let made: Vec<_> = (0..60)
            .map(|_| {
                let client = server.client.clone();
                thread::spawn(move || {
                    let session = create(&client);
                    let ask = "hostname; cat /etc/hostname /etc/machine-id; for r in urandom random; do head -c 24 /dev/$r | base64; done";
                    let said = session.out(ask);
                    let lines: Vec<String> = said.lines().map(str::to_owned).collect();
                    let [name, file, machine, urandom, random] = lines.try_into().expect("five lines");
                    assert_eq!(name, file, "the name is the same in both places");
                    (session.id, [name, machine, urandom, random])
                })
            })
            .collect();
        let mut ids = HashSet::new();
        for one in made {
            let (id, facts) = one.join().expect("it was created");
            for fact in facts {
                assert!(!fact.is_empty() && seen.insert(fact.clone()), "round {round}: {fact} of {id} is another's, too");
            }
            assert!(ids.insert(id.clone()) && seen.insert(id), "round {round}: an id twice");
        }
        let deleting: Vec<_> = ids
            .iter()
            .map(|id| {
                let (client, path) = (server.client.clone(), format!("/v1/sessions/{id}"));
                thread::spawn(move || client.delete(&path).expect(204))
            })
            .collect();
        deleting.into_iter().for_each(|one| drop(one.join().expect("it was deleted")));
        nothing_left_of(server.data(), &ids);
    }
    assert_eq!(server.terminate(), Some(0));
    leftovers::expect_none(server.data());
}

#[test]
fn a_create_claims_what_is_ready_and_the_pool_fills_up_again_and_ends_with_the_server() {
    let _alone = alone();
    let mut server = server();
    let ready = full_pool(server.data());
    let listed = server.client.get("/v1/sessions").expect(200).json();
    assert_eq!(listed["items"], json!([]), "what is in the pool is nobody's session");
    let session = create(&server.client);
    assert!(ready.contains(&session.id), "it was ready: {} of {ready:?}", session.id);
    assert_eq!(session.out("echo it answers"), "it answers");
    eventually("the pool fills up again", || (supervised(server.data()).len() == POOL as usize + 1).then_some(()));
    assert_eq!(server.terminate(), Some(0));
    // The session goes on; only what was nobody's is gone.
    let left: HashSet<String> = leftovers::directories(server.data()).into_iter().collect();
    assert_eq!(left, HashSet::from([session.id.clone()]));
    assert_eq!(supervised(server.data()), left);
    server.start_again();
    let session = session.on(&server.client);
    assert_eq!(session.out("echo still"), "still");
    session.delete();
    assert_eq!(server.terminate(), Some(0));
    leftovers::expect_none(server.data());
}

#[test]
fn after_a_kill_of_the_server_its_pool_is_adopted_or_removed() {
    let _alone = alone();
    let mut server = server();
    let before = full_pool(server.data());
    server.kill();
    assert_eq!(supervised(server.data()), before, "what was in the pool survives a kill");
    server.start_again();
    // Whichever it is: what is there in the end is exactly one full pool, and it works.
    let after = full_pool(server.data());
    let removed: HashSet<String> = before.difference(&after).cloned().collect();
    nothing_left_of(server.data(), &removed);
    let session = create(&server.client);
    assert_eq!(session.out("echo it answers"), "it answers");
    session.delete();
    assert_eq!(server.terminate(), Some(0));
    leftovers::expect_none(server.data());
}

/// One test at a time: sixty idle sandboxes keep a small machine busy, and the others wait for what has its limits.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
