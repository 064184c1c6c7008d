//! `history`: the line of a session's snapshots, back to its first ancestor, and what was forked from it, as a tree.
//!
//! ```text
//! * 0198…01  2026-03-01 14:05:09  base  80.1 MiB
//! ├─ fork 0198…f1  hibernated  try-1
//! ├─ * 0198…02  2026-03-01 15:00:00  given up  3.0 MiB
//! * 0198…03  2026-03-01 16:00:00  -  4.5 MiB
//! └─ session 0198…aa  running  build  (this one)
//! ```
//! The line that leads to the session is drawn straight down; what leaves it is drawn beside it.

use super::{
    Context,
    failure::{NOT_FOUND, REFUSED, Result},
    http::{Call, Client},
    select,
    text::{clip, local, safe, size},
};
use api_types::{Session, Snapshot};
use model::{SessionId, SnapshotId, SnapshotState};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Most ancestors that are gone through: whoever has more reads on at the oldest.
const MAX_ANCESTORS: usize = 100;

/// `dormouse history`.
///
/// # Errors
/// What the server refuses.
pub async fn command(ctx: &Context, word: &str) -> Result<()> {
    let session = select::session(&ctx.client, word).await?;
    let story = Story::read(&ctx.client, &session).await?;
    if ctx.json {
        return ctx.print_json(&json!({ "session_id": session.id, "snapshots": story.snapshots, "sessions": story.sessions }));
    }
    ctx.print(&Tree::new(session.id, &story)?.draw())
}

/// What the server knows of a session's line, as it says it.
struct Story {
    /// Of the session and its ancestors, by id, deleted ones too.
    snapshots: Vec<Value>,
    /// The session, its ancestors that are there, and all that was forked from them.
    sessions: Vec<Value>,
    line: HashSet<SessionId>,
}

impl Story {
    async fn read(client: &Client, session: &Session) -> Result<Story> {
        let mut snapshots: BTreeMap<SnapshotId, Value> = BTreeMap::new();
        let mut sessions: BTreeMap<SessionId, Value> = BTreeMap::new();
        let (mut line, mut looked_up) = (HashSet::new(), HashSet::new());
        let mut next = vec![session.id];
        while let Some(id) = next.pop() {
            if line.len() == MAX_ANCESTORS || !line.insert(id) {
                continue;
            }
            let parents = of_session(client, id, &mut snapshots).await?;
            for value in client.list::<Value>(&format!("/v1/sessions?limit=1000&parent={id}")).await? {
                let fork: Session = Context::read(&value)?;
                sessions.insert(fork.id, value);
            }
            if let Some(value) = there(client.json::<Value>(Call::get(format!("/v1/sessions/{id}"))).await)? {
                sessions.insert(id, value);
            }
            let made_from = if id == session.id { session.parent.as_ref().and_then(|parent| parent.snapshot_id) } else { None };
            for parent in parents.into_iter().chain(made_from) {
                if snapshots.contains_key(&parent) || !looked_up.insert(parent) {
                    continue;
                }
                // By what finds deleted ones, too: they still say whose they were.
                let found = there(client.list::<Snapshot>(&format!("/v1/snapshots?find={parent}")).await)?;
                next.extend(found.into_iter().flatten().map(|snapshot| snapshot.session_id));
            }
        }
        Ok(Story { snapshots: snapshots.into_values().collect(), sessions: sessions.into_values().collect(), line })
    }
}

/// Adds a session's snapshots; tells what they were taken after.
async fn of_session(client: &Client, id: SessionId, all: &mut BTreeMap<SnapshotId, Value>) -> Result<Vec<SnapshotId>> {
    let mut parents = Vec::new();
    let values: Vec<Value> = client.list(&format!("/v1/snapshots?limit=1000&include_deleted=true&session={id}")).await?;
    for value in values {
        let snapshot: Snapshot = Context::read(&value)?;
        parents.extend(snapshot.parent_id);
        all.insert(snapshot.id, value);
    }
    Ok(parents)
}

/// What is gone, or isn't the caller's to see, is no failure here.
fn there<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(failure) if failure.status == NOT_FOUND || failure.status == REFUSED => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Snapshots as they follow each other, and the sessions that stand at them.
struct Tree {
    asked: SessionId,
    snapshots: HashMap<SnapshotId, Snapshot>,
    /// What was taken after each; `None`: what follows nothing that is known.
    after: HashMap<Option<SnapshotId>, Vec<SnapshotId>>,
    /// Sessions by where they stand, and whether they were forked there.
    standing: HashMap<Option<SnapshotId>, Vec<(Session, bool)>>,
    /// The line to the session that was asked for.
    line: HashSet<SnapshotId>,
}

impl Tree {
    fn new(asked: SessionId, story: &Story) -> Result<Tree> {
        let read = |value: &Value| -> Result<Snapshot> { Context::read(value) };
        let listed: Vec<Snapshot> = story.snapshots.iter().map(read).collect::<Result<_>>()?;
        let snapshots: HashMap<SnapshotId, Snapshot> = listed.iter().map(|snapshot| (snapshot.id, snapshot.clone())).collect();
        let known = |id: Option<SnapshotId>| id.filter(|id| snapshots.contains_key(id));
        let mut after: HashMap<Option<SnapshotId>, Vec<SnapshotId>> = HashMap::new();
        for snapshot in &listed {
            after.entry(known(snapshot.parent_id)).or_default().push(snapshot.id);
        }
        let mut standing: HashMap<Option<SnapshotId>, Vec<(Session, bool)>> = HashMap::new();
        let mut line = HashSet::new();
        for value in &story.sessions {
            let session: Session = Context::read(value)?;
            let forked = !story.line.contains(&session.id);
            let from = session.parent.as_ref().and_then(|parent| parent.snapshot_id);
            let at = known(if forked { from } else { session.latest_snapshot_id });
            if session.id == asked {
                let mut step = at;
                while let Some(id) = step.filter(|id| line.insert(*id)) {
                    step = snapshots.get(&id).and_then(|snapshot| known(snapshot.parent_id));
                }
            }
            standing.entry(at).or_default().push((session, forked));
        }
        Ok(Tree { asked, snapshots, after, standing, line })
    }

    fn draw(&self) -> String {
        let mut out = String::new();
        for first in self.after.get(&None).into_iter().flatten() {
            self.branch(*first, "", "", &mut out);
        }
        for (session, forked) in self.standing.get(&None).into_iter().flatten() {
            out.push_str(&format!("{}\n", self.session_line(session, *forked)));
        }
        out
    }

    /// A snapshot and what follows it: what goes straight on below it, the rest beside. `before` stands before its first
    /// line, `beside` before the others.
    fn branch(&self, first: SnapshotId, before: &str, beside: &str, out: &mut String) {
        let (mut id, mut lead) = (first, before);
        loop {
            let Some(snapshot) = self.snapshots.get(&id) else { return };
            out.push_str(&format!("{lead}* {}\n", snapshot_line(snapshot)));
            lead = beside;
            let after = self.after.get(&Some(id)).map(Vec::as_slice).unwrap_or_default();
            let straight = after.iter().find(|id| self.line.contains(id)).or(after.last());
            let sides = after.iter().filter(|side| Some(*side) != straight);
            let standing = self.standing.get(&Some(id)).map(Vec::as_slice).unwrap_or_default();
            for side in sides {
                self.branch(*side, &format!("{beside}├─ "), &format!("{beside}│  "), out);
            }
            for (n, (session, forked)) in standing.iter().enumerate() {
                let mark = if straight.is_none() && n + 1 == standing.len() { "└─" } else { "├─" };
                out.push_str(&format!("{beside}{mark} {}\n", self.session_line(session, *forked)));
            }
            match straight {
                Some(next) => id = *next,
                None => return,
            }
        }
    }

    fn session_line(&self, session: &Session, forked: bool) -> String {
        let what = if forked { "fork" } else { "session" };
        let name = session.key.as_deref().or(session.name.as_deref()).unwrap_or("-");
        let asked = if session.id == self.asked { "  (this one)" } else { "" };
        format!("{what} {}  {}  {}{asked}", session.id, session.state, safe(&clip(name, 30)))
    }
}

fn snapshot_line(snapshot: &Snapshot) -> String {
    let name = safe(&clip(snapshot.name.as_deref().unwrap_or("-"), 30));
    let what = match snapshot.state {
        SnapshotState::Ready if snapshot.memory => size(snapshot.size_bytes),
        SnapshotState::Ready => format!("{}, disk only", size(snapshot.size_bytes)),
        state => state.to_string(),
    };
    let taken_by = match snapshot.taken_by.as_str() {
        "" | "user" => String::new(),
        other => format!("  for a {}", safe(&clip(other, 30))),
    };
    format!("{}  {}  {name}  {what}{taken_by}", snapshot.id, local(snapshot.created_at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> String {
        format!("01890000-0000-7000-8000-{n:012}")
    }

    fn snapshot(n: u32, of: u32, parent: Option<u32>) -> Value {
        json!({
            "id": id(n), "session_id": id(of), "name": format!("s{n}"), "state": "ready", "generation": 1, "memory": true,
            "size_bytes": 1024, "unique_bytes": 0, "parent_id": parent.map(id), "created_at": "2026-03-01T08:00:00Z",
            "keep_until": null, "taken_by": "user", "requires": { "runtime": "gvisor", "template": "debian" },
        })
    }

    fn session(n: u32, latest: Option<u32>, parent: Option<(u32, u32)>) -> Value {
        json!({
            "id": id(n), "key": format!("k{n}"), "name": null, "task": null, "state": "running", "reason": null,
            "runtime": "gvisor", "template": "debian", "generation": 1, "created_at": "2026-03-01T08:00:00Z",
            "updated_at": "2026-03-01T08:00:00Z", "last_activity_at": "2026-03-01T08:00:00Z", "idle": null,
            "hibernate_after": null, "timeout_seconds": null, "timeout_at": null, "on_timeout": "hibernate",
            "ttl_seconds": null, "expires_at": null, "wake_at": null, "memory": "live", "parent_task": null, "machine": null,
            "operation": null, "server_time": "2026-03-01T08:00:00Z", "latest_snapshot_id": latest.map(id),
            "parent": parent.map(|(session, snapshot)| json!({ "session_id": id(session), "snapshot_id": id(snapshot) })),
        })
    }

    /// The tree with ids shortened to what tells them apart.
    fn drawn(asked: u32, line: &[u32], snapshots: Vec<Value>, sessions: Vec<Value>) -> Vec<String> {
        let line = line.iter().map(|n| id(*n).parse().unwrap()).collect();
        let story = Story { snapshots, sessions, line };
        let text = Tree::new(id(asked).parse().unwrap(), &story).unwrap().draw();
        let short = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let kept = words.iter().filter(|word| {
                matches!(**word, "*" | "├─" | "└─" | "│" | "fork" | "session" | "(this" | "one)" | "deleted")
                    || (word.len() < 5 && (word.starts_with('s') || word.starts_with('k')))
            });
            kept.copied().collect::<Vec<_>>().join(" ")
        };
        text.lines().map(short).collect()
    }

    #[test]
    fn the_line_goes_straight_down_and_forks_leave_it() {
        // 100 was taken twice, set back to its first, taken again; 200 was forked from that and taken once.
        let snapshots =
            vec![snapshot(1, 100, None), snapshot(2, 100, Some(1)), snapshot(3, 100, Some(1)), snapshot(4, 200, Some(3))];
        let sessions =
            vec![session(100, Some(3), None), session(200, Some(4), Some((100, 3))), session(300, Some(1), Some((100, 1)))];
        let lines = drawn(200, &[200, 100], snapshots, sessions);
        assert_eq!(lines, ["* s1", "├─ * s2", "├─ fork k300", "* s3", "├─ session k100", "* s4", "└─ session k200 (this one)"]);
    }

    #[test]
    fn what_follows_something_unknown_begins_a_line_of_its_own() {
        let lines = drawn(100, &[100], vec![snapshot(5, 100, Some(4))], vec![session(100, Some(5), None)]);
        assert_eq!(lines, ["* s5", "└─ session k100 (this one)"]);
        assert_eq!(drawn(100, &[100], vec![], vec![session(100, None, None)]), ["session k100 (this one)"]);
    }

    /// Of two that were asked for at once the one with the later id can have been taken first.
    #[test]
    fn what_follows_is_told_by_the_parent_not_by_the_id() {
        let snapshots = vec![snapshot(1, 100, Some(2)), snapshot(2, 100, None)];
        let lines = drawn(100, &[100], snapshots, vec![session(100, Some(1), None)]);
        assert_eq!(lines, ["* s2", "* s1", "└─ session k100 (this one)"]);
    }

    #[test]
    fn a_deleted_one_keeps_its_place() {
        let mut gone = snapshot(1, 100, None);
        gone["state"] = json!("deleted");
        let lines = drawn(100, &[100], vec![gone, snapshot(2, 100, Some(1))], vec![session(100, Some(2), None)]);
        assert_eq!(lines, ["* s1 deleted", "* s2", "└─ session k100 (this one)"]);
    }
}
