//! What a session keeps: through kills of client and server, through sleep with everything gone, through many cycles.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use dormouse_tests::{Choices, PATIENCE, Server, Session, eventually, leftovers, seed};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Where a program inside learns that it has done enough.
const ENOUGH: &str = "/tmp/enough";

/// Writes a stream that depends on the seed and the position only, about 20 MB each second, until it has written enough
/// and is told so. Its error stream says which process it is, at the beginning and at the end.
const STREAM: &str = r#"
import os, sys, time
seed, least, most = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
mask = (1 << 64) - 1
def words(state, count):
    out = bytearray()
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out += (z ^ (z >> 31)).to_bytes(8, "big")
    return bytes(out)
base = words(seed, 8192)
sys.stderr.write("pid %d\n" % os.getpid()); sys.stderr.flush()
n, began = 0, time.monotonic()
while n < most and (n < least or not os.path.exists("/tmp/enough")):
    turn = n * 7919 % len(base)
    chunk = memoryview(n.to_bytes(8, "big") + base[turn:] + base[:turn])
    while chunk:
        chunk = chunk[os.write(1, chunk):]
    n += 1
    ahead = n * len(base) / 20e6 - (time.monotonic() - began)
    # The clock has gone on while it slept: it doesn't catch up in one burst.
    if ahead < -0.5:
        began += -ahead
    elif ahead > 0:
        time.sleep(ahead)
sys.stderr.write("pid %d\nchunks %d\n" % (os.getpid(), n))
"#;

/// The same stream, made here.
fn expected_stream(seed: u64, chunks: u64) -> (blake3::Hash, u64) {
    let mut choices = Choices(seed);
    let base: Vec<u8> = (0..8192).flat_map(|_| choices.next().to_be_bytes()).collect();
    let (mut hash, mut bytes) = (blake3::Hasher::new(), 0);
    for n in 0..chunks {
        let turn = usize::try_from(n * 7919).expect("64 bits") % base.len();
        hash.update(&n.to_be_bytes()).update(&base[turn..]).update(&base[..turn]);
        bytes += 8 + base.len() as u64;
    }
    (hash.finalize(), bytes)
}

/// A client that reads one stream by offset to its end, and is cut off whenever somebody asks for it.
struct Follower {
    thread: thread::JoinHandle<Followed>,
    cuts: Arc<AtomicUsize>,
}

struct Followed {
    /// Every byte, in order.
    hash: blake3::Hash,
    bytes: u64,
    /// The stream itself, where it was to be kept.
    kept: Vec<u8>,
    /// How often it had to begin again.
    connections: usize,
}

impl Follower {
    /// Follows `path`, whose next offset belongs behind it.
    fn start(session: &Session, path: String, stream: &'static str, keep: bool) -> Follower {
        let cuts = Arc::new(AtomicUsize::new(0));
        let (session, cuts_) = (session.clone(), cuts.clone());
        let thread = thread::spawn(move || {
            let (mut hash, mut next, mut kept) = (blake3::Hasher::new(), 0, Vec::new());
            let (mut connections, mut cut, mut quiet_since) = (0, 0, Instant::now());
            loop {
                assert!(quiet_since.elapsed() < 2 * PATIENCE, "{stream} of {path}: nothing comes after {next} bytes");
                let Ok(body) = session.client.stream(&format!("{path}{next}"), "application/x-ndjson") else {
                    // The server is away.
                    thread::sleep(Duration::from_millis(10));
                    continue;
                };
                connections += 1;
                for line in BufReader::new(body).lines() {
                    let Ok(line) = line else { break };
                    let Ok(item) = serde_json::from_str::<Value>(&line) else { continue };
                    if item["stream"] == "exit" {
                        return Followed { hash: hash.finalize(), bytes: next, kept, connections };
                    }
                    assert_eq!(item["stream"], stream, "only what was asked for, and no gap: {line}");
                    assert_eq!(item["offset"], next, "it goes on exactly where it was cut");
                    let bytes = BASE64_STANDARD.decode(item["data_b64"].as_str().expect("data")).expect("base64");
                    hash.update(&bytes);
                    next += bytes.len() as u64;
                    quiet_since = Instant::now();
                    if keep {
                        kept.extend(bytes);
                    }
                    if cuts_.load(Ordering::Relaxed) != cut {
                        cut = cuts_.load(Ordering::Relaxed);
                        // Dropped in the middle, as when a client is killed.
                        break;
                    }
                }
            }
        });
        Follower { thread, cuts }
    }

    fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::Relaxed);
    }

    fn end(self) -> Followed {
        self.thread.join().expect("the follower saw nothing wrong")
    }
}

/// Opens a terminal that runs `script` in a shell.
fn terminal(session: &Session, script: &str) -> String {
    let body = json!({ "argv": ["bash", "-c", script], "cols": 80, "rows": 24 });
    session.client.post(&session.path("/terminals"), &body).expect(201).json()["id"].as_str().expect("an id").to_owned()
}

/// The processes of one session on this machine.
fn processes_of(server: &Server, session: &Session) -> Vec<(i32, String)> {
    leftovers::processes(server.data()).into_iter().filter(|(_, line)| line.contains(&session.id)).collect()
}

/// Waits until nothing of a hibernated session is alive any more: its image was tried out, its original is gone.
fn asleep_for_good(server: &Server, session: &Session) {
    eventually("every process of the sleeping session goes", || processes_of(server, session).is_empty().then_some(()));
    let ids = [session.id.clone()];
    eventually("its control groups go", || leftovers::cgroups(&ids).is_empty().then_some(()));
}

#[test]
fn a_stream_and_a_counter_come_whole_through_twenty_kills_and_five_sleeps() {
    let seed = seed();
    let mut choices = Choices(seed);
    let mut server = Server::start();
    let mut session = server.session();
    let stream_seed = choices.next() >> 1;
    session.write_file("/root/stream.py", STREAM.as_bytes()).expect(204);
    let least = if dormouse_tests::long() { 16_000 } else { 1_000 };
    let argv = json!(["python3", "/root/stream.py", stream_seed.to_string(), least.to_string(), "16000"]);
    let exec = session.client.post(&session.path("/execs"), &json!({ "argv": argv })).expect(201).json();
    let (id, pid) = (exec["id"].as_str().expect("an id").to_owned(), exec["pid"].clone());
    let count = format!("i=0; while [ ! -e {ENOUGH} ]; do i=$((i+1)); echo \"$i $$\"; sleep 0.01; done; echo \"end $$\"");
    let counter = terminal(&session, &count);
    let output = session.path(&format!("/execs/{id}/output?follow=true&stream=stdout&from="));
    let printed = session.path(&format!("/terminals/{counter}/output?follow=true&from="));
    let followers = [Follower::start(&session, output, "stdout", false), Follower::start(&session, printed, "tty", true)];

    // Twenty kills and five sleeps, in an order that the seed decides.
    let mut moments: Vec<bool> = (0..25).map(|n| n < 5).collect();
    for i in (1..moments.len()).rev() {
        moments.swap(i, usize::try_from(choices.below(i as u64 + 1)).expect("small"));
    }
    let mut sleeps = 0;
    for sleeps_now in moments {
        thread::sleep(Duration::from_millis(choices.below(150)));
        if !sleeps_now {
            match choices.below(4) {
                0 => followers[0].cut(),
                1 => followers[1].cut(),
                _ => {
                    server.crash();
                    session = session.on(&server.client);
                }
            }
            continue;
        }
        sleeps += 1;
        if sleeps % 2 == 0 {
            // The server dies somewhere on the way into sleep.
            let asked = session.clone();
            let hibernate = thread::spawn(move || asked.client.send("POST", &asked.path("/hibernate"), &[], Some(b"{}")).is_ok());
            thread::sleep(Duration::from_millis(choices.below(400)));
            server.crash();
            session = session.on(&server.client);
            hibernate.join().expect("it was answered, or its server died");
            eventually("the operation is finished or undone", || session.show()["operation"].is_null().then_some(()));
            println!("sleep {sleeps}, cut short: {}", session.state());
        }
        session.hibernate();
        if sleeps > 2 {
            asleep_for_good(&server, &session);
        }
        session.wake();
    }
    assert_eq!(session.exec(&id)["state"], "running", "it outlived all of it");
    session.out(&format!("touch {ENOUGH}"));

    let [streamed, counted] = followers.map(Follower::end);
    let ended = session.ended(&id);
    assert_eq!((&ended["state"], &ended["exit_code"]), (&json!("exited"), &json!(0)), "{ended}");
    let said = String::from_utf8(session.output(&id, "stderr")).expect("text");
    let said: Vec<&str> = said.lines().collect();
    let pid_line = format!("pid {pid}");
    assert_eq!(said[..2], [pid_line.as_str(), pid_line.as_str()], "the same process from the beginning to the end");
    let chunks: u64 = said[2].strip_prefix("chunks ").and_then(|n| n.parse().ok()).expect("a number of chunks");
    let (hash, bytes) = expected_stream(stream_seed, chunks);
    println!("{} MB over {} connections", bytes / 1_000_000, streamed.connections);
    assert_eq!((streamed.bytes, streamed.hash), (bytes, hash), "what a client has followed");
    assert_eq!(ended["stdout_bytes"], bytes);
    let kept = session.output(&id, "stdout");
    assert_eq!((kept.len() as u64, blake3::hash(&kept)), (bytes, hash), "what the server has kept");

    let text = String::from_utf8(counted.kept).expect("digits");
    let mut lines: Vec<&str> = text.lines().collect();
    let shell = lines.pop().and_then(|last| last.strip_prefix("end ")).expect("the shell's last word").to_owned();
    println!("{} numbers over {} connections", lines.len(), counted.connections);
    for (n, line) in lines.iter().enumerate() {
        assert_eq!(*line, format!("{} {shell}", n + 1), "every number exactly once, from the same shell");
    }
    // How far it comes depends on the machine, which the stream keeps busy; that it came far enough to be cut does not.
    assert!(lines.len() >= 10, "it was counting all the time: {}", lines.len());
    server.delete_all_and_check();
}

/// Two processes with one connection between them: every number that one sends comes back from the other, and is noted.
const PAIR: &str = r#"
import os, socket, time
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    link, _ = server.accept()
    while True:
        link.sendall(link.recv(64))
server_port = server.getsockname()[1]
server.close()
link = socket.create_connection(("127.0.0.1", server_port))
n = 0
while True:
    n += 1
    link.sendall(b"%d\n" % n)
    assert link.recv(64) == b"%d\n" % n
    with open("/run/pair.new", "w") as f:
        f.write("%d %d %d" % (link.getsockname()[1], server_port, n))
    os.rename("/run/pair.new", "/run/pair")
    time.sleep(0.02)
"#;

/// Milliseconds since 1970, on this machine.
fn now_ms() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis())
        .expect("before the year 292 million")
}

#[test]
fn everything_is_as_it_was_after_a_sleep_with_every_process_gone_and_the_server_restarted() {
    let mut server = Server::start();
    let session = server.session();
    session.write_file("/root/kept", b"on disk").expect(204);
    session.write_file("/tmp/kept", b"in memory").expect(204);
    session.write_file("/root/pair.py", PAIR.as_bytes()).expect(204);
    let pair = session.start_sh("exec python3 /root/pair.py");
    // A shell that is asked by a file and answers in one: what it knows is in its variables only.
    let script = "colour=blue; list=(one 'two words' three); declare -A map=([key]=value); n=0
        sleep 100000 & job=$!
        cd /var/tmp
        while :; do
            if [ -e /tmp/ask ]; then
                rm /tmp/ask; n=$((n+1))
                kill -0 $job && running=$(jobs -r | wc -l)
                echo \"$$ $colour ${list[1]} ${#list[@]} ${map[key]} $n $job $running $PWD\" > /tmp/told.new; mv /tmp/told.new /tmp/told
            fi
            sleep 0.02
        done";
    let shell = terminal(&session, script);
    let ask = |session: &Session| {
        session.out("rm -f /tmp/told; touch /tmp/ask");
        eventually("the shell answers", || Some(session.read_file("/tmp/told")).filter(|reply| reply.status == 200)).text()
    };
    let pairs = |session: &Session| {
        let reply =
            eventually("the pair talks", || Some(session.read_file("/run/pair")).filter(|reply| reply.status == 200)).text();
        let numbers: Vec<u64> = reply.split(' ').map(|n| n.parse().expect("a number")).collect();
        (numbers[0], numbers[1], numbers[2])
    };
    let first = ask(&session);
    let fields: Vec<&str> = first.split_whitespace().collect();
    let (before_port, before_server, _) = pairs(&session);

    session.hibernate();
    asleep_for_good(&server, &session);
    assert_eq!(server.terminate(), Some(0));
    assert_eq!(leftovers::processes(server.data()), [], "nothing of this data directory is alive");
    assert_eq!(leftovers::mounts(server.data()), [] as [&Path; 0]);
    server.start_again();
    let session = session.on(&server.client);
    assert_eq!(session.state(), "hibernated");
    assert_eq!(session.read_file("/root/kept").expect(200).text(), "on disk", "its disk can be read while it sleeps");
    session.wake();

    // The clock first: this is the first exec after the wake.
    let before = now_ms();
    let inside = session.out("date +%s%3N");
    let after = now_ms();
    let inside: i64 = inside.parse().expect("milliseconds");
    assert!((before - 50..=after + 50).contains(&inside), "{before} ≤ {inside} ≤ {after}, within 50 ms");

    assert_eq!(session.show()["memory"], "live");
    assert_eq!(session.read_file("/root/kept").expect(200).text(), "on disk");
    assert_eq!(session.read_file("/tmp/kept").expect(200).text(), "in memory");
    let second = ask(&session);
    let expected = format!("{} blue two words 3 value 2 {} 1 /var/tmp\n", fields[0], fields[7]);
    assert_eq!(second, expected, "the same shell, job and variables as {first}");
    let (port, server_port, told) = pairs(&session);
    assert_eq!((port, server_port), (before_port, before_server), "the same connection");
    eventually("the connection goes on", || (pairs(&session).2 > told + 3).then_some(()));
    assert_eq!(session.exec(&pair)["state"], "running");
    let shown = session.client.get(&session.path("/terminals")).expect(200).json();
    assert_eq!((&shown["items"][0]["id"], &shown["items"][0]["state"]), (&json!(shell), &json!("running")));
    server.delete_all_and_check();
}

/// Counts in its memory; each request over a socket is one more.
const COUNTER: &str = r#"
import os, socket
server = socket.socket(socket.AF_UNIX); server.bind("/run/counter"); server.listen()
n = 0
while True:
    link, _ = server.accept()
    n += 1
    link.sendall(b"%d %d" % (os.getpid(), n))
    link.close()
"#;

const ASK_COUNTER: &str =
    "python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.connect(\"/run/counter\"); print(s.recv(64).decode())'";

/// The tree as seen from inside: every path with type, mode, owner, size and target, and the content of what changes.
/// Without times: gVisor's own and the disk's differ by parts of a millisecond for what was written inside.
const TREE: &str = r"{ find / -xdev -printf '%p %y %m %U:%G %s %l\n' | grep -v ' d ' | sort
    find / -xdev -type d -printf '%p %m %U:%G\n' | sort
    find /root /etc /usr/share/zsh* /usr/share/vim* -xdev -type f -print0 | sort -z | xargs -0 sha256sum; } | sha256sum";

/// Bytes on disk below `dir`, other file systems not counted.
fn disk_use(dir: &Path) -> u64 {
    let out = std::process::Command::new("du").arg("-sxk").arg(dir).output().expect("du");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    1024 * text.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_else(|| panic!("du: {text}"))
}

#[test]
fn twenty_cycles_of_change_and_sleep_keep_disk_and_memory_and_use_no_more_space() {
    let server = Server::start();
    let session = server.session();
    session.write_file("/root/counter.py", COUNTER.as_bytes()).expect(204);
    session.start_sh("exec python3 /root/counter.py");
    eventually("the counter listens", || (session.sh(ASK_COUNTER).code == Some(0)).then_some(()));
    let first = session.out(ASK_COUNTER);
    let (pid, mut n) = first.split_once(' ').map(|(pid, n)| (pid.to_owned(), n.parse::<u64>().expect("a number"))).expect("two");
    let mut use_of = Vec::new();
    for cycle in 1..=20 {
        // A new file, an old one of the template changed, another deleted, a directory of the template renamed on and on.
        let (from, to) = (cycle - 1, cycle);
        let from = if from == 0 { "zsh".to_owned() } else { format!("zsh-{from}") };
        session.out(&format!(
            "set -e; head -c 1000000 /dev/urandom > /root/new-{cycle}; rm -f /root/new-{}
             echo cycle {cycle} >> /etc/motd; echo {cycle} > /etc/issue
             rm \"$(find /usr/share/man /usr/share/zoneinfo /usr/share/perl -type f | sort | head -1)\"
             mv /usr/share/{from} /usr/share/zsh-{to}; echo {cycle} > /usr/share/zsh-{to}/inside; sync",
            cycle - 1
        ));
        let before = session.out(TREE);
        session.hibernate();
        let thaw = cycle % 3 == 0;
        if !thaw {
            asleep_for_good(&server, &session);
            // It sleeps with one image, whose size is that of the sandbox's memory; the rest is what it costs.
            let images = server.data().join("sessions").join(&session.id).join("image");
            assert_eq!(std::fs::read_dir(&images).expect("images").count(), 1, "spent images are gone");
            use_of.push((disk_use(server.data()) - disk_use(&images), disk_use(&images)));
        }
        let inside = session.read_file(&format!("/usr/share/zsh-{to}/inside"));
        assert_eq!(inside.expect(200).text(), format!("{cycle}\n"), "read while it sleeps");
        assert_eq!(session.read_file(&format!("/usr/share/{from}/inside")).status, 404);
        session.wake();
        assert_eq!(session.event("wake.done")["data"]["memory"], "restored");
        assert_eq!(session.out(TREE), before, "the tree after cycle {cycle}");
        n += 1;
        assert_eq!(session.out(ASK_COUNTER), format!("{pid} {n}"), "the counter after cycle {cycle}");
    }
    assert_eq!(session.show()["generation"], 21);
    // The first ones still fill caches; from then on only journals and the store grow, by little.
    let (early, last) = (use_of[2], *use_of.last().expect("many"));
    println!("disk use: {use_of:?}");
    assert!(last.0 < early.0 + (4 << 20), "disk use is flat: {use_of:?}");
    // [M] gVisor keeps about as much as each cycle writes and deletes (1 MB here) in its memory, and so in the image.
    assert!(last.1 < early.1 + (24 << 20), "the image grows by no more than that: {use_of:?}");
    server.delete_all_and_check();
}

/// Starts a count in an exec: a number each 10 ms.
fn count(session: &Session) -> String {
    session.start_sh("i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done")
}

/// How far a count has come; every number so far must stand there exactly once.
#[track_caller]
fn counted(session: &Session, exec: &str) -> usize {
    let text = String::from_utf8(session.output(exec, "stdout")).expect("digits");
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().enumerate().for_each(|(n, line)| assert_eq!(line, (n + 1).to_string(), "every number exactly once"));
    whole.lines().count()
}

#[track_caller]
fn counts_on(session: &Session, exec: &str) {
    let before = counted(session, exec);
    eventually("it counts on", || (counted(session, exec) > before + 3).then_some(()));
}

/// Processes of the session's sandbox on this machine.
fn sandbox_pids(session: &Session) -> Vec<u32> {
    let groups = leftovers::cgroups(std::slice::from_ref(&session.id));
    let first =
        groups.iter().filter_map(|dir| std::fs::read_to_string(dir.join("cgroup.procs")).ok()).find(|text| !text.is_empty());
    first.unwrap_or_default().lines().filter_map(|line| line.parse().ok()).collect()
}

/// Ticks of processor time that the processes have taken (proc_pid_stat(5), fields 14 and 15).
fn ticks(pids: &[u32]) -> u64 {
    let of = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<u64> = stat.rsplit_once(") ")?.1.split(' ').skip(11).take(2).filter_map(|n| n.parse().ok()).collect();
        Some(fields.iter().sum::<u64>())
    };
    pids.iter().filter_map(of).sum()
}

fn kill(pid: u32) {
    // SAFETY: kill takes two integers; the process belongs to a session of this test.
    unsafe { libc::kill(i32::try_from(pid).expect("a process id"), libc::SIGKILL) };
}

#[test]
fn a_paused_session_takes_no_processor_time_and_goes_on_where_it_was() {
    let server = Server::start();
    let session = server.session();
    let exec = count(&session);
    counts_on(&session, &exec);
    let paused = session.call("pause").expect(200).json();
    assert_eq!((&paused["state"], &paused["memory"]), (&json!("paused"), &json!("live")));
    assert_eq!(session.call("pause").expect(200).json()["state"], "paused", "already so");
    let (pids, before) = (sandbox_pids(&session), counted(&session, &exec));
    assert!(!pids.is_empty(), "its processes are there");
    let taken = ticks(&pids);
    // Two looks at something that must not change.
    thread::sleep(Duration::from_millis(500));
    assert_eq!((ticks(&pids), counted(&session, &exec)), (taken, before), "frozen");
    let refused = session.client.post(&session.path("/execs"), &json!({ "shell": "true" }));
    assert_eq!((refused.status, refused.problem().as_str()), (409, "paused"));
    assert_eq!(session.call("unpause").expect(200).json()["state"], "running");
    counts_on(&session, &exec);
    // It sleeps from there, too, and wakes running.
    session.call("pause").expect(200);
    session.hibernate();
    session.wake();
    counts_on(&session, &exec);
    server.delete_all_and_check();
}

#[test]
fn stop_gives_memory_up_and_keeps_the_disk_and_start_boots_afresh_on_it() {
    let server = Server::start();
    let session = server.session();
    session.out("echo disk > /root/kept; echo disk > /var/tmp/kept; echo memory > /tmp/lost");
    let exec = count(&session);
    counts_on(&session, &exec);
    let stopped = session.call("stop").expect(200).json();
    assert_eq!((&stopped["state"], &stopped["memory"], &stopped["reason"]), (&json!("stopped"), &json!("lost"), &json!("asked")));
    let lost = session.exec(&exec);
    // The TERM of the stop ended it, or else the end of its sandbox did; that it finished is never said.
    assert!(["killed", "lost"].contains(&lost["state"].as_str().expect("a state")) && lost["exit_code"].is_null(), "{lost}");
    assert!(counted(&session, &exec) > 3, "what it printed is kept");
    assert_eq!(session.read_file("/root/kept").expect(200).text(), "disk\n", "its disk can be read");
    let wake = session.call("wake");
    assert_eq!((wake.status, wake.problem().as_str()), (422, "no_memory_snapshot"));
    let hibernate = session.call("hibernate");
    assert_eq!((hibernate.status, hibernate.problem().as_str()), (422, "not_running"));
    let refused = session.client.post(&session.path("/execs"), &json!({ "shell": "true" }));
    assert_eq!((refused.status, refused.problem().as_str()), (422, "not_running"));
    asleep_for_good(&server, &session);
    let started = session.call("start").expect(200).json();
    assert_eq!((&started["state"], &started["generation"]), (&json!("running"), &json!(2)));
    assert_eq!(session.out("cat /root/kept /var/tmp/kept; ls /tmp"), "disk\ndisk");
    // `start` in the call itself.
    session.call("stop").expect(200);
    let exec =
        session.client.post(&session.path("/execs?wait=true&start=true"), &json!({ "shell": "cat /root/kept" })).expect(201);
    assert_eq!(exec.json()["stdout"], "disk\n");
    server.delete_all_and_check();
}

#[test]
fn a_session_deleted_in_the_middle_of_anything_stays_deleted() {
    let mut choices = Choices(seed());
    let server = Server::start();
    for what in ["hibernate", "hibernate", "wake", "stop", "start", "pause", "create"] {
        let key = format!("while-{what}-{}", choices.next());
        let begun = if what == "create" {
            let (client, body) = (server.client.clone(), json!({ "key": key }));
            thread::spawn(move || drop(client.post("/v1/sessions", &body)))
        } else {
            let session = server.session_with(&json!({ "key": key }));
            match what {
                "wake" => drop(session.hibernate()),
                "start" => drop(session.call("stop").expect(200)),
                _ => {}
            }
            thread::spawn(move || drop(session.call(what)))
        };
        let id = eventually("the session is there", || {
            let list = server.client.get(&format!("/v1/sessions?key={key}")).expect(200).json();
            list["items"][0]["id"].as_str().map(str::to_owned)
        });
        thread::sleep(Duration::from_millis(choices.below(150)));
        let path = format!("/v1/sessions/{id}");
        server.client.delete(&path).expect(204);
        begun.join().expect("it was answered");
        let after = server.client.get(&path);
        assert!(after.status == 410 || after.json()["state"] == "deleted", "{what}: {} {}", after.status, after.text());
        let wake = server.client.post(&format!("{path}/wake"), &json!({}));
        assert_eq!(wake.status, 410, "{what}: {}", wake.text());
        // Its key is free.
        let fresh = server.session_with(&json!({ "key": key }));
        assert_ne!(fresh.id, id);
        fresh.delete();
    }
    leftovers::expect_none(server.data());
}

#[test]
fn twenty_callers_with_one_key_get_one_session() {
    let mut server = Server::start();
    let callers: Vec<_> = (0..20)
        .map(|_| {
            let client = server.client.clone();
            thread::spawn(move || {
                let reply = client.post("/v1/sessions", &json!({ "key": "mine", "task": "one" }));
                (reply.status, reply.json()["id"].as_str().expect("an id").to_owned())
            })
        })
        .collect();
    let answers: Vec<(u16, String)> = callers.into_iter().map(|caller| caller.join().expect("an answer")).collect();
    assert_eq!(answers.iter().filter(|(status, _)| *status == 201).count(), 1, "{answers:?}");
    assert_eq!(answers.iter().filter(|(status, _)| *status == 200).count(), 19, "{answers:?}");
    assert!(answers.iter().all(|(_, id)| *id == answers[0].1), "{answers:?}");
    server.crash();
    let again = server.client.post("/v1/sessions", &json!({ "key": "mine" })).expect(200).json();
    assert_eq!(again["id"], answers[0].1, "after a crash, too");
    server.delete_all_and_check();
}

#[test]
fn a_sandbox_that_is_killed_leaves_a_stopped_session_that_says_why() {
    let server = Server::start();
    let session = server.session();
    session.out("echo disk > /root/kept; sync");
    let exec = count(&session);
    counts_on(&session, &exec);
    // What is in flight is told so, never a success.
    let waiting = session.clone();
    let waiting = thread::spawn(move || {
        waiting.client.post(&waiting.path("/execs?wait=true"), &json!({ "shell": "echo begun; sleep 1000" }))
    });
    eventually("it has begun", || {
        let list = session.client.get(&session.path("/execs")).expect(200).json();
        (list["items"].as_array().expect("a list").iter().filter(|e| e["state"] == "running" && e["stdout_bytes"] != 0).count()
            == 2)
            .then_some(())
    });
    let pids = sandbox_pids(&session);
    assert!(!pids.is_empty());
    pids.into_iter().for_each(kill);
    let stopped = eventually("the session is stopped", || Some(session.show()).filter(|s| s["state"] == "stopped"));
    assert_eq!(stopped["memory"], "lost");
    assert!(["sandbox_exited", "killed"].contains(&stopped["reason"].as_str().expect("a reason")), "{stopped}");
    let lost = session.exec(&exec);
    assert_eq!(
        (&lost["state"], &lost["exit_code"], &lost["reason"]),
        (&json!("lost"), &json!(null), &stopped["reason"]),
        "{lost}"
    );
    let reply = waiting.join().expect("an answer");
    assert!(reply.json()["state"] == "lost" || reply.status >= 400, "{} {}", reply.status, reply.text());
    assert!(counted(&session, &exec) > 3, "what it printed is kept");
    asleep_for_good(&server, &session);
    session.call("start").expect(200);
    assert_eq!(session.out("cat /root/kept"), "disk");
    server.delete_all_and_check();
}

#[test]
fn a_server_that_is_asked_to_end_says_good_and_its_sessions_go_on() {
    let mut server = Server::start();
    let session = server.session();
    let exec = count(&session);
    counts_on(&session, &exec);
    let before = counted(&session, &exec);
    let asked = Instant::now();
    assert_eq!(server.terminate(), Some(0));
    assert!(asked.elapsed() < Duration::from_secs(10), "it takes its time: {:?}", asked.elapsed());
    assert!(!processes_of(&server, &session).is_empty(), "its sandbox is there");
    server.start_again();
    let session = session.on(&server.client);
    assert_eq!(session.state(), "running");
    assert!(counted(&session, &exec) >= before);
    counts_on(&session, &exec);
    assert_eq!(session.show()["generation"], 1, "it is the same sandbox");
    server.delete_all_and_check();
}
