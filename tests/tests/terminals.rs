//! Terminals come back right: screens, sizes, offsets, input through cuts, paste, and viewers of all kinds.

#[path = "../../crates/screen/tests/common/mod.rs"]
mod common;
mod tmux;

use common::{Cell, RECORDINGS, cells};
use dormouse_tests::{
    Choices, Server, Session, eventually, seed,
    terminal::{Viewer, output_of},
};
use model::Offset;
use serde_json::{Value, json};
use tmux::{Pane, Tmux};
use wire::terminal::{ClientFrame, EndStatus, InputSeq, ServerFrame};

/// Opens a terminal of 80 by 24 that runs a shell command.
fn open(session: &Session, command: &str) -> String {
    let body = json!({ "argv": ["sh", "-c", command], "cols": 80, "rows": 24 });
    let terminal = session.client.post(&session.path("/terminals"), &body).expect(201).json();
    terminal["id"].as_str().expect("a terminal has an id").to_owned()
}

fn terminal(session: &Session, id: &str) -> Value {
    session.client.get(&session.path(&format!("/terminals/{id}"))).expect(200).json()
}

fn screen_text(session: &Session, id: &str) -> String {
    session.client.get(&session.path(&format!("/terminals/{id}/screen"))).expect(200).text()
}

/// All output so far, byte for byte.
fn raw(session: &Session, id: &str) -> Vec<u8> {
    let path = session.path(&format!("/terminals/{id}/output?from=0"));
    session.client.send("GET", &path, &[("accept", "application/octet-stream")], None).expect("an answer").expect(200).body
}

fn attach(session: &Session, id: &str, query: &str) -> Viewer {
    Viewer::attach(session, id, query).unwrap_or_else(|e| panic!("attach with {query}: {e}"))
}

fn client() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// Reads up to the screen; what it redraws, and the offset that it is true for.
fn first_screen(viewer: &mut Viewer) -> (Offset, Vec<u8>) {
    let frames = viewer.until("the screen", |frame| matches!(frame, ServerFrame::Screen { .. }));
    match frames.into_iter().next_back() {
        Some(ServerFrame::Screen { offset, bytes }) => (offset, bytes.to_vec()),
        other => panic!("{other:?}"),
    }
}

/// Waits until nothing that was sent before is on its way any more.
fn settle(viewer: &mut Viewer) -> Vec<ServerFrame> {
    assert!(viewer.send(ClientFrame::Ping));
    viewer.until("a pong", |frame| matches!(frame, ServerFrame::Pong))
}

/// Everything that tmux tells about a pane's screen.
fn look(pane: &Pane, capture: &[&str], cols: u16) -> (Vec<Vec<Cell>>, String) {
    let shows = |(c, style): &Cell| *c != ' ' || style.iter().any(|part| !part.starts_with("bg "));
    let trimmed = |mut line: Vec<Cell>| {
        line.truncate(line.iter().rposition(shows).map_or(0, |at| at + 1));
        line
    };
    let lines = cells(&pane.capture(&[&["-e", "-N"], capture].concat())).into_iter().map(trimmed).collect();
    // tmux leaves the cursor of an alternate screen that became narrower right of its edge; it is drawn at the edge.
    let col = pane.ask("#{cursor_x}").parse::<u16>().expect("a number").min(cols - 1);
    let rest = "#{cursor_y} #{pane_width}x#{pane_height} alternate #{alternate_on} cursor #{cursor_flag} keys \
         #{keypad_cursor_flag} keypad #{keypad_flag} mouse #{mouse_any_flag} #{mouse_standard_flag} #{mouse_button_flag} \
         #{mouse_all_flag} #{mouse_sgr_flag} insert #{insert_flag} wrap #{wrap_flag} origin #{origin_flag} region \
         #{scroll_region_upper}-#{scroll_region_lower} title #{pane_title}";
    (lines, format!("cursor {col} {}", pane.ask(rest)))
}

/// vim, htop, less, a shell and coding agents' screens, recorded, played in a real session: what a viewer gets who comes
/// at the same size, at 20×5 and at 300×100 shows what tmux shows that was there all the time and was resized.
#[test]
fn screens_after_a_reattach_equal_those_of_tmux_at_three_sizes() {
    let server = Server::start();
    let session = server.session();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/screen/tests/recordings");
    let recordings = RECORDINGS.map(|name| (name, std::fs::read(format!("{folder}/{name}.bin")).expect("a recording")));
    for (name, bytes) in &recordings {
        session.write_file(&format!("/root/{name}.bin"), bytes).expect(204);
    }
    let tmux = Tmux::start();
    for (name, bytes) in &recordings {
        for size @ (cols, rows) in [(80, 24), (20, 5), (300, 100)] {
            let id = open(&session, &format!("stty raw -echo; cat /root/{name}.bin; exec sleep 1000"));
            eventually("it is played", || (terminal(&session, &id)["output_bytes"] == bytes.len()).then_some(()));
            let mut viewer = attach(&session, &id, &format!("client={}&cols={cols}&rows={rows}&from=screen", client()));
            let frames = viewer.until("the screen", |frame| matches!(frame, ServerFrame::Screen { .. }));
            assert!(frames.contains(&ServerFrame::Size { cols, rows }), "{name}: the writer's size counts: {frames:?}");
            let Some(ServerFrame::Screen { offset, bytes: redraw }) = frames.last() else { unreachable!() };
            assert_eq!(offset.0, bytes.len() as u64, "{name}");
            let theirs = tmux.showing(bytes, (80, 24));
            theirs.resize(size);
            let ours = tmux.showing(redraw, size);
            let capture: &[&str] = if size == (80, 24) { &["-S", "-"] } else { &[] };
            let (theirs, ours) = (look(&theirs, capture, cols), look(&ours, capture, cols));
            assert_eq!(theirs.0.len(), ours.0.len(), "{name} at {cols}x{rows}: lines");
            for (at, (theirs, ours)) in theirs.0.iter().zip(&ours.0).enumerate() {
                assert_eq!(theirs, ours, "{name} at {cols}x{rows}: line {at}");
            }
            assert_eq!(theirs.1, ours.1, "{name} at {cols}x{rows}");
            viewer.cut();
            session.client.delete(&session.path(&format!("/terminals/{id}"))).expect(204);
        }
    }
    server.delete_all_and_check();
}

/// `seq 1 100000` while the link is cut five times, once with the server: who joins by offset has each byte once.
#[test]
fn output_by_offset_is_whole_through_cuts() {
    let mut server = Server::start();
    let session = server.session();
    let id = open(&session, "stty -echo; echo ready; read go; seq 1 100000");
    eventually("the terminal echoes no more", || (raw(&session, &id) == b"ready\r\n").then_some(()));
    let me = client();
    let (mut all, mut cuts) = (Vec::new(), 0);
    let mut choices = Choices(seed());
    let mut session = session;
    let mut go = true;
    'links: loop {
        let mut viewer = attach(&session, &id, &format!("client={me}&cols=80&rows=24&from={}", all.len()));
        if std::mem::take(&mut go) {
            viewer.until("the writer's role", |frame| *frame == ServerFrame::Writer { you: true });
            assert!(viewer.type_text(1, "\n"));
        }
        let until = all.len() + 40_000 + choices.below(60_000) as usize;
        loop {
            match viewer.next().expect("the link holds") {
                ServerFrame::Output { offset, bytes } => {
                    assert_eq!(offset.0, all.len() as u64, "output follows without hole or repetition");
                    all.extend_from_slice(&bytes);
                }
                ServerFrame::Ended { status, .. } => {
                    assert_eq!(status, EndStatus(0));
                    break 'links;
                }
                other => assert!(!matches!(other, ServerFrame::Screen { .. } | ServerFrame::Gap { .. }), "{other:?}"),
            }
            if cuts < 5 && all.len() > until {
                viewer.cut();
                cuts += 1;
                if cuts == 3 {
                    server.crash();
                    session = session.on(&server.client);
                }
                break;
            }
        }
    }
    assert_eq!(cuts, 5);
    let expected: String = std::iter::once("ready\r\n".to_owned()).chain((1..=100_000).map(|n| format!("{n}\r\n"))).collect();
    assert!(all == expected.as_bytes(), "{} bytes, not {}", all.len(), expected.len());
    assert!(raw(&session, &id) == expected.as_bytes(), "read by offset it is the same");
    server.delete_all_and_check();
}

/// Someone who types through cuts, as the contract says: sends again what was not acknowledged, under the same number.
struct Typist {
    me: String,
    seq: u64,
    typed: Vec<String>,
    refused: Vec<String>,
}

impl Typist {
    fn new() -> Typist {
        Typist { me: client(), seq: 0, typed: Vec::new(), refused: Vec::new() }
    }

    /// Types a word; the link is cut while it is on its way, up to twice.
    fn types(&mut self, session: &Session, id: &str, word: String, mode: &str, cuts: u64) {
        self.seq += 1;
        let query = format!("client={}&cols=80&rows=24&mode={mode}", self.me);
        for _ in 0..cuts {
            let mut viewer = attach(session, id, &query);
            first_screen(&mut viewer);
            viewer.type_text(self.seq, &word);
            viewer.cut();
        }
        let mut viewer = attach(session, id, &query);
        assert!(viewer.type_text(self.seq, &word));
        let seq = InputSeq(self.seq);
        let answer = viewer.until("an answer to the input", |frame| match frame {
            ServerFrame::InputTyped { seq: answered } | ServerFrame::InputRefused { seq: answered, .. } => *answered == seq,
            _ => false,
        });
        match answer.last() {
            Some(ServerFrame::InputTyped { .. }) => self.typed.push(word),
            _ => self.refused.push(word),
        }
    }
}

/// Input that is typed while the link is cut is acknowledged later or visibly refused, never lost in silence, never
/// doubled, with two clients that type in turn, through a server's death and a sleep.
#[test]
fn input_through_cuts_is_typed_once_or_refused() {
    let mut server = Server::start();
    let mut session = server.session();
    let id = open(&session, "stty raw -echo; printf ready; exec cat");
    eventually("it reads", || (screen_text(&session, &id).contains("ready")).then_some(()));
    let mut choices = Choices(seed());
    let (mut one, mut other) = (Typist::new(), Typist::new());
    // Somebody has the role for a while, so that input without `take` is refused.
    for round in 0..24 {
        if round == 8 {
            server.crash();
            session = session.on(&server.client);
        }
        if round == 16 {
            session.hibernate();
        }
        let hold = (round % 6 == 5).then(|| {
            let mut holder = attach(&session, &id, &format!("client={}&cols=80&rows=24&mode=take", client()));
            holder.until("the role", |frame| *frame == ServerFrame::Writer { you: true });
            holder
        });
        let mode = if round % 6 == 5 || round % 3 == 0 { "write" } else { "take" };
        let (typist, name) = if round % 2 == 0 { (&mut one, 'a') } else { (&mut other, 'b') };
        typist.types(&session, &id, format!("<{name}{round}>"), mode, choices.below(3));
        drop(hold);
    }
    let refused: Vec<&String> = one.refused.iter().chain(&other.refused).collect();
    assert!(refused.len() >= 4, "a role that someone else has is not typed over: {refused:?}");
    let count = one.typed.iter().chain(&other.typed).map(String::len).sum::<usize>() + "ready".len();
    let text = eventually("everything is echoed", || Some(raw(&session, &id)).filter(|bytes| bytes.len() >= count));
    let text = String::from_utf8(text).expect("text");
    for typist in [&one, &other] {
        let mut at = 0;
        for word in &typist.typed {
            assert_eq!(text.matches(word.as_str()).count(), 1, "{word} is there once: {text}");
            let found = text.find(word.as_str()).expect("it is there");
            assert!(found >= at, "{word} is in its place: {text}");
            at = found;
        }
    }
    for word in refused {
        assert!(!text.contains(word.as_str()), "{word} was refused: {text}");
    }
    assert_eq!(text.len(), count, "and nothing else: {text}");
    server.delete_all_and_check();
}

/// After a refusal a client goes on with the next number; one that comes back while its old link still counts types at
/// once.
#[test]
fn a_refused_input_and_a_stale_link_keep_nobody_from_typing() {
    let server = Server::start();
    let session = server.session();
    let id = open(&session, "stty raw -echo; exec cat");
    let (a, b) = (client(), client());
    let mut first = attach(&session, &id, &format!("client={a}&cols=80&rows=24"));
    assert!(first.type_text(1, "1"));
    first.until("typed", |frame| *frame == ServerFrame::InputTyped { seq: InputSeq(1) });
    let mut second = attach(&session, &id, &format!("client={b}&cols=80&rows=24&mode=take"));
    second.until("the role", |frame| *frame == ServerFrame::Writer { you: true });
    assert!(first.type_text(2, "2"));
    first.until("refused", |frame| matches!(frame, ServerFrame::InputRefused { seq: InputSeq(2), .. }));
    assert!(first.send(ClientFrame::Take));
    assert!(first.type_text(3, "3"));
    first.until("typed", |frame| *frame == ServerFrame::InputTyped { seq: InputSeq(3) });
    assert!(first.type_text(2, "2"));
    first.until("refused as before", |frame| matches!(frame, ServerFrame::InputRefused { seq: InputSeq(2), .. }));
    // The old link is open still; the same client comes again.
    let mut again = attach(&session, &id, &format!("client={a}&cols=80&rows=24"));
    again.until("the role at once", |frame| *frame == ServerFrame::Writer { you: true });
    assert!(again.type_text(3, "3"));
    again.until("acknowledged", |frame| *frame == ServerFrame::InputTyped { seq: InputSeq(3) });
    assert!(again.type_text(4, "4"));
    again.until("typed", |frame| *frame == ServerFrame::InputTyped { seq: InputSeq(4) });
    eventually("each once", || (raw(&session, &id) == b"134").then_some(()));
    server.delete_all_and_check();
}

/// The writer's size counts, an observer changes nothing, and the role can be taken.
#[test]
fn the_writers_size_counts_and_observers_change_nothing() {
    let server = Server::start();
    let session = server.session();
    let id = open(&session, "exec env PS1= bash --norc --noprofile");
    let size_inside = |writer: &mut Viewer, seq: &mut u64, expected: &str| {
        *seq += 1;
        assert!(writer.type_text(*seq, "echo size $(stty size).\n"));
        let expected = format!("size {expected}.");
        eventually("stty tells the size", || screen_text(&session, &id).contains(&expected).then_some(()));
        *seq += 1;
        assert!(writer.type_text(*seq, "clear\n"));
        eventually("the screen is clear", || (!screen_text(&session, &id).contains("size ")).then_some(()));
    };
    let (mut a, mut c) = (
        attach(&session, &id, &format!("client={}&cols=100&rows=30", client())),
        attach(&session, &id, &format!("client={}&cols=60&rows=15", client())),
    );
    let (mut a_seq, mut c_seq) = (0, 0);
    let said = first_frames(&mut a);
    assert!(
        said.contains(&ServerFrame::Writer { you: true }) && said.contains(&ServerFrame::Size { cols: 100, rows: 30 }),
        "{said:?}"
    );
    let said = first_frames(&mut c);
    assert!(
        said.contains(&ServerFrame::Writer { you: false }) && said.contains(&ServerFrame::Size { cols: 100, rows: 30 }),
        "{said:?}"
    );
    size_inside(&mut a, &mut a_seq, "30 100");

    let mut watcher = attach(&session, &id, &format!("client={}&cols=40&rows=10&mode=observe", client()));
    let said = first_frames(&mut watcher);
    assert!(said.contains(&ServerFrame::Writer { you: false }), "{said:?}");
    assert!(watcher.type_text(1, "echo from the observer\n"));
    watcher
        .until("refused", |frame| matches!(frame, ServerFrame::InputRefused { seq: InputSeq(1), reason } if !reason.is_empty()));
    assert!(watcher.send(ClientFrame::Resize { cols: 41, rows: 11 }) && watcher.send(ClientFrame::Take));
    let said = settle(&mut watcher);
    assert!(!said.iter().any(|frame| matches!(frame, ServerFrame::Size { .. } | ServerFrame::Writer { .. })), "{said:?}");
    assert!(watcher.type_text(2, "echo from the observer\n"));
    watcher.until("refused", |frame| matches!(frame, ServerFrame::InputRefused { seq: InputSeq(2), .. }));
    // So is who may write and isn't the writer.
    assert!(c.send(ClientFrame::Resize { cols: 61, rows: 16 }));
    settle(&mut c);
    size_inside(&mut a, &mut a_seq, "30 100");
    assert!(a.send(ClientFrame::Resize { cols: 120, rows: 40 }));
    watcher.until("the size", |frame| *frame == ServerFrame::Size { cols: 120, rows: 40 });
    size_inside(&mut a, &mut a_seq, "40 120");

    assert!(c.send(ClientFrame::Take));
    c.until("the role", |frame| *frame == ServerFrame::Writer { you: true });
    let mut missing = vec![ServerFrame::Writer { you: false }, ServerFrame::Size { cols: 61, rows: 16 }];
    a.until("no role, and the new writer's size", |frame| {
        missing.retain(|wanted| wanted != frame);
        missing.is_empty()
    });
    size_inside(&mut c, &mut c_seq, "16 61");
    // The writer leaves: who may write follows.
    c.cut();
    a.until("the role is back", |frame| *frame == ServerFrame::Writer { you: true });
    size_inside(&mut a, &mut a_seq, "40 120");
    assert!(!String::from_utf8_lossy(&raw(&session, &id)).contains("from the observer"));
    // A token that may only read observes.
    let body = json!({ "name": "reader", "scopes": ["read"] });
    let token = server.client.post("/v1/tokens", &body).expect(201).json()["token"].as_str().expect("a token").to_owned();
    let reader = session.on(&server.client.with_token(&token));
    assert!(Viewer::attach(&reader, &id, "").is_err(), "it may not write");
    let mut reading = attach(&reader, &id, "mode=observe");
    first_screen(&mut reading);
    server.delete_all_and_check();
}

/// Frames up to the screen, and everything that was on its way with it.
fn first_frames(viewer: &mut Viewer) -> Vec<ServerFrame> {
    let mut frames = viewer.until("the screen", |frame| matches!(frame, ServerFrame::Screen { .. }));
    frames.extend(settle(viewer));
    frames
}

/// A viewer that doesn't read never slows the program, and later gets the screen as it is then.
#[test]
fn a_viewer_that_does_not_read_slows_nobody() {
    let server = Server::start();
    let session = server.session();
    let id = open(&session, "stty -echo; read go; seq 1 3000000; touch /root/done; echo finished; exec sleep 1000");
    let mut slow = attach(&session, &id, &format!("client={}&cols=80&rows=24&mode=observe", client()));
    first_screen(&mut slow);
    let mut writer = attach(&session, &id, &format!("client={}&cols=80&rows=24&from=0", client()));
    assert!(writer.type_text(1, "\n"));
    // Only what was acknowledged is sure to be typed.
    writer.until("the acknowledgement", |frame| matches!(frame, ServerFrame::InputTyped { .. }));
    writer.cut();
    eventually("the program gets to its end", || (session.read_file("/root/done").status == 200).then_some(()));
    eventually("all is kept", || screen_text(&session, &id).contains("finished").then_some(()));
    let total = terminal(&session, &id)["output_bytes"].as_u64().expect("a number");
    let frames = slow.until("the screen again", |frame| matches!(frame, ServerFrame::Screen { .. }));
    let seen: u64 = frames.iter().map(|f| if let ServerFrame::Output { bytes, .. } = f { bytes.len() as u64 } else { 0 }).sum();
    assert!(seen < total / 2, "{seen} of {total} bytes were read before the screen came again");
    let Some(ServerFrame::Screen { offset, bytes }) = frames.last() else { unreachable!() };
    assert_eq!(offset.0, total);
    let tmux = Tmux::start();
    let shown = tmux.showing(bytes, (80, 24)).screen();
    assert!(shown.contains("3000000\nfinished"), "{shown}");
    server.delete_all_and_check();
}

#[test]
fn screens_and_output_are_read_in_every_form() {
    let server = Server::start();
    let session = server.session();
    let id = open(&session, r"stty -onlcr; printf 'plain \033[1;31mred\033[0m\r\n\033]0;a title\007'; exec sleep 1000");
    eventually("the title", || (terminal(&session, &id)["title"] == "a title").then_some(()));
    let get = |rest: &str| session.client.get(&session.path(&format!("/terminals/{id}/{rest}")));
    let text = get("screen?format=text").expect(200);
    assert_eq!((text.content_type.as_str(), text.text().trim_end()), ("text/plain; charset=utf-8", "plain red"));
    assert_eq!(text.text(), get("screen").expect(200).text());
    let total = raw(&session, &id).len();
    assert_eq!(text.header("dormouse-offset"), Some(total.to_string().as_str()));
    let ansi = get("screen?format=ansi").expect(200).text();
    assert!(ansi.contains("plain") && ansi.contains("31") && ansi.contains("red"), "{ansi:?}");
    let view = get("screen?format=json").expect(200).json();
    assert_eq!((&view["cols"], &view["rows"], &view["title"]), (&json!(80), &json!(24), &json!("a title")), "{view}");
    assert_eq!(view["cursor"]["row"], 1, "{view}");
    assert_eq!(get("screen?format=png").expect(400).json()["field"], "format");

    let lines: Vec<Value> = get("output?from=6").expect(200).text().lines().filter(|l| !l.is_empty()).map(parse).collect();
    assert_eq!((&lines[0]["stream"], &lines[0]["offset"]), (&json!("tty"), &json!(6)), "{lines:?}");
    let bytes: Vec<u8> = lines.iter().flat_map(|line| decode(&line["data_b64"])).collect();
    assert_eq!(bytes, &raw(&session, &id)[6..]);
    // Wrong places are told.
    assert!(Viewer::attach(&session, &id, "from=99999999").is_err());
    for bad in ["cols=0&rows=1", "cols=80", "mode=own", "client=me", "from=x", "size=1"] {
        let path = session.path(&format!("/terminals/{id}/attach?{bad}"));
        assert_eq!(session.client.get(&path).status, 400, "{bad}");
        assert!(Viewer::attach(&session, &id, bad).is_err(), "{bad}");
    }
    server.delete_all_and_check();
}

fn parse(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))
}

fn decode(text: &Value) -> Vec<u8> {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.decode(text.as_str().expect("base64")).expect("base64")
}

/// A sleep keeps the terminal: its shell, its variables, its screen, its modes, its offsets.
#[test]
fn a_terminal_sleeps_and_wakes_with_its_shell_and_its_screen() {
    let server = Server::start();
    let session = server.session();
    let id = open(&session, "exec env PS1='% ' bash --norc --noprofile");
    let me = client();
    let mut viewer = attach(&session, &id, &format!("client={me}&cols=90&rows=20"));
    assert!(viewer.type_text(1, "f() { echo value $((x+1)); }; x=41; printf '\\033[32mgreen\\033[0m\\n'; echo pid $$\n"));
    eventually("it is shown", || screen_text(&session, &id).contains("\npid ").then_some(()));
    eventually("the prompt after it", || {
        let text = screen_text(&session, &id);
        text.lines().skip_while(|line| !line.starts_with("pid ")).any(|line| line.starts_with('%')).then_some(())
    });
    let ansi = || session.client.get(&session.path(&format!("/terminals/{id}/screen?format=ansi"))).expect(200).text();
    let (before, length) = (ansi(), raw(&session, &id).len() as u64);
    let pid = screen_text(&session, &id).lines().find_map(|l| l.strip_prefix("pid ").map(str::to_owned)).expect("a pid");
    session.hibernate();
    eventually("the link ends", || viewer.next().is_none().then_some(()));
    assert_eq!(raw(&session, &id).len() as u64, length, "output is read asleep");
    assert_eq!(terminal(&session, &id)["state"], "running");
    // Neither a viewer that comes back by itself nor an observer wakes it.
    for query in ["wake=false", "mode=observe"] {
        assert!(Viewer::attach(&session, &id, query).is_err(), "{query}");
        assert_eq!(session.state(), "hibernated", "{query}");
    }
    // Typing does.
    let mut viewer = attach(&session, &id, &format!("client={me}&cols=90&rows=20"));
    assert_eq!(session.show()["generation"], 2);
    let (offset, _) = first_screen(&mut viewer);
    assert_eq!(offset.0, length);
    assert_eq!(ansi(), before);
    assert!(viewer.type_text(1, "echo never again\n"), "an old number");
    viewer.until("acknowledged", |frame| *frame == ServerFrame::InputTyped { seq: InputSeq(1) });
    assert!(viewer.type_text(2, "f; echo same $$\n"));
    eventually("the shell goes on", || screen_text(&session, &id).contains(&format!("value 42\nsame {pid}\n")).then_some(()));
    assert!(!screen_text(&session, &id).contains("never again"));
    let frames = viewer.until("its output", |frame| matches!(frame, ServerFrame::Output { bytes, .. } if bytes.ends_with(b"% ")));
    assert!(String::from_utf8_lossy(&output_of(&frames, offset)).contains("value 42"), "output goes on at the offset");
    server.delete_all_and_check();
}

#[test]
fn the_end_of_a_terminal_is_told_with_its_code() {
    let server = Server::start();
    let session = server.session();
    for (command, status, code, signal) in [("exit 7", 7, json!(7), Value::Null), ("kill -9 $$", -9, Value::Null, json!(9))] {
        let id = open(&session, &format!("stty -echo; read go; echo bye; {command}"));
        let mut viewer = attach(&session, &id, &format!("client={}&cols=80&rows=24", client()));
        assert!(viewer.type_text(1, "\n"));
        let frames = viewer.until("the end", |frame| matches!(frame, ServerFrame::Ended { .. }));
        assert!(matches!(frames.last(), Some(ServerFrame::Ended { status: EndStatus(s), .. }) if *s == status), "{frames:?}");
        let text = frames.iter().any(|frame| matches!(frame, ServerFrame::Output { bytes, .. } if bytes.ends_with(b"bye\r\n")));
        assert!(text, "all output comes before the end: {frames:?}");
        assert!(viewer.next().is_none(), "then the link ends");
        let ended = eventually("it has ended", || Some(terminal(&session, &id)).filter(|t| t["state"] == "ended"));
        assert_eq!((&ended["exit_code"], ended.get("signal").unwrap_or(&Value::Null)), (&code, &signal), "{ended}");
        // Who comes later sees the last screen and the end.
        let mut late = attach(&session, &id, &format!("client={}&cols=80&rows=24&mode=observe", client()));
        first_screen(&mut late);
        late.until("the end", |frame| matches!(frame, ServerFrame::Ended { status: EndStatus(s), .. } if *s == status));
        session.event("terminal.closed");
    }
    // One that is closed by a call is hung up.
    let id = open(&session, "trap 'echo hung up' HUP; sleep 1000");
    session.client.delete(&session.path(&format!("/terminals/{id}"))).expect(204);
    eventually("it has ended", || (terminal(&session, &id)["state"] == "ended").then_some(()));
    server.delete_all_and_check();
}

/// Through the real client: a paste of three lines arrives as one paste, also after detaching and coming back.
#[test]
fn a_paste_of_three_lines_arrives_as_one() {
    let server = Server::start();
    let made = server.cli(&["new", "paste"]).output().expect("it runs");
    assert!(made.status.success(), "{made:?}");
    let program = "import os,sys,tty\n\
        tty.setraw(0)\n\
        os.write(1,b'\\x1b[?2004hasks\\r\\n')\n\
        for n in (1,2):\n\
        \x20   data=b''\n\
        \x20   while not data.endswith(b'\\x1b[201~'): data+=os.read(0,4096)\n\
        \x20   os.write(1,b'paste %d: %s\\r\\n' % (n, repr(data).encode()))\n";
    let put = server.client.get("/v1/sessions?key=paste").expect(200).json();
    let session = Session::new(server.client.clone(), &put["items"][0]);
    session.write_file("/root/paste.py", program.as_bytes()).expect(204);
    let tmux = Tmux::start();
    let pane = tmux.dormouse(&server, "run paste -- python3 /root/paste.py", (100, 24));
    pane.shows_line("asks");
    pane.paste("one\ntwo\nthree");
    pane.shows_line(r"paste 1: b'\x1b[200~one\rtwo\rthree\x1b[201~'");
    pane.press(&["C-\\", "d"]);
    pane.shows_line("status=0");
    assert_eq!(pane.ask("#{alternate_on}"), "0");
    // The mode is the session's: a terminal that comes later gets it by the redraw.
    let later = tmux.dormouse(&server, "attach paste", (100, 24));
    later.shows("paste 1");
    later.paste("four\nfive\nsix");
    later.shows_line(r"paste 2: b'\x1b[200~four\rfive\rsix\x1b[201~'");
    later.shows_line("status=0");
    server.delete_all_and_check();
}
