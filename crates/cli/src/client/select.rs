//! Which session, exec or terminal a word on the command line means.

use super::{
    failure::{Failure, Result},
    http::{Call, Client, encode},
};
use api_types::{Exec, Session, Terminal};
use model::SessionId;

/// Shortest piece of an id that is taken for one. Ids begin with the time, so that short beginnings are all alike.
const SHORTEST_PIECE: usize = 2;

/// Something that can be named by an id or a piece of one.
pub trait Named {
    /// Its full id.
    fn id(&self) -> String;
    /// How candidates are told apart.
    fn label(&self) -> String;
    /// A name of its own, taken before pieces of ids.
    fn own_name(&self) -> Option<&str> {
        None
    }
}

impl Named for Session {
    fn id(&self) -> String {
        self.id.to_string()
    }
    fn label(&self) -> String {
        let name = self.key.as_deref().or(self.name.as_deref()).unwrap_or("-");
        format!("{}  {}  {name}", self.id, self.state)
    }
    fn own_name(&self) -> Option<&str> {
        self.key.as_deref()
    }
}

impl Named for Exec {
    fn id(&self) -> String {
        self.id.to_string()
    }
    fn label(&self) -> String {
        format!("{}  {}  {}", self.id, self.state, super::text::command(&self.argv))
    }
    fn own_name(&self) -> Option<&str> {
        self.key.as_deref()
    }
}

impl Named for Terminal {
    fn id(&self) -> String {
        self.id.to_string()
    }
    fn label(&self) -> String {
        format!("{}  {}  {}", self.id, self.state, self.name.as_deref().unwrap_or("-"))
    }
    fn own_name(&self) -> Option<&str> {
        self.name.as_deref()
    }
}

/// The one of `items` that `word` names: by its id, its name, or a unique beginning or end of its id, in that order.
/// `what` is the kind of thing, for messages.
///
/// # Errors
/// Not found; a conflict that lists the candidates where several fit.
pub fn pick<'a, T: Named>(items: &'a [T], word: &str, what: &str) -> Result<&'a T> {
    let lower = word.to_ascii_lowercase();
    let by_id: Vec<&T> = items.iter().filter(|item| item.id() == lower).collect();
    let by_name: Vec<&T> = items.iter().filter(|item| item.own_name() == Some(word)).collect();
    let by_piece = |fits: &dyn Fn(&str) -> bool| -> Vec<&'a T> {
        if lower.len() < SHORTEST_PIECE { Vec::new() } else { items.iter().filter(|item| fits(&item.id())).collect() }
    };
    let by_start = by_piece(&|id| id.starts_with(&lower));
    let by_end = by_piece(&|id| id.ends_with(&lower));
    let mut candidates = Vec::new();
    for found in [by_id, by_name, by_start, by_end] {
        match found.as_slice() {
            [one] => return Ok(one),
            [] => {}
            several => candidates.extend(several.iter().map(|item| item.label())),
        }
    }
    if candidates.is_empty() {
        return Err(Failure::not_found(format!("no {what} '{word}'")));
    }
    candidates.dedup();
    let total = candidates.len();
    candidates.truncate(10);
    let list = candidates.join("\n  ");
    let more = if total > 10 { format!("\n  … and {} more", total - 10) } else { String::new() };
    Err(Failure::conflict(format!("'{word}' is the beginning or end of {total} {what} ids — give more of it:\n  {list}{more}")))
}

/// The session that `word` names.
///
/// # Errors
/// As [`pick`], and those of asking the server.
pub async fn session(client: &Client, word: &str) -> Result<Session> {
    if let Ok(id) = word.parse::<SessionId>() {
        return client.json(Call::get(format!("/v1/sessions/{id}"))).await;
    }
    let by_key: Vec<Session> = client.list(&format!("/v1/sessions?key={}", encode(word))).await?;
    if let [one] = by_key.as_slice() {
        return Ok(one.clone());
    }
    let all: Vec<Session> = client.list("/v1/sessions?limit=1000").await?;
    match pick(&all, word, "session") {
        Ok(session) => Ok(session.clone()),
        Err(mut failure) => {
            if failure.status == super::failure::NOT_FOUND {
                failure.message.push_str(" — 'dormouse ls' shows those that are there");
            }
            Err(failure)
        }
    }
}

/// The exec of a session that `word` names.
///
/// # Errors
/// As [`pick`], and those of asking the server.
pub async fn exec(client: &Client, session: &Session, word: &str) -> Result<Exec> {
    let all: Vec<Exec> = client.list(&format!("/v1/sessions/{}/execs?limit=1000", session.id)).await?;
    pick(&all, word, "exec").cloned()
}

/// The terminals of a session, the newest first.
///
/// # Errors
/// Those of asking the server.
pub async fn terminals(client: &Client, session: &Session) -> Result<Vec<Terminal>> {
    let mut all: Vec<Terminal> = client.list(&format!("/v1/sessions/{}/terminals", session.id)).await?;
    all.sort_by_key(|terminal| std::cmp::Reverse(terminal.started_at));
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(&'static str, Option<&'static str>);

    impl Named for Fake {
        fn id(&self) -> String {
            self.0.to_owned()
        }
        fn label(&self) -> String {
            self.0.to_owned()
        }
        fn own_name(&self) -> Option<&str> {
            self.1
        }
    }

    const ITEMS: [Fake; 4] = [
        Fake("0198f0c2-a7b0-7cc3-8d6e-5f4a3b2c1d00", Some("web")),
        Fake("0198f0c2-a7b1-7cc3-8d6e-5f4a3b2c1d01", Some("0198f0c2-a7b0")),
        Fake("0198f0c3-0000-7cc3-8d6e-5f4a3b2c99ff", None),
        Fake("ff98f0c4-0000-7cc3-8d6e-5f4a3b2cabcd", None),
    ];

    #[test]
    fn id_then_name_then_a_unique_beginning_or_end() {
        for (word, index) in [
            ("0198f0c2-a7b0-7cc3-8d6e-5f4a3b2c1d00", 0),
            ("0198F0C2-A7B0-7CC3-8D6E-5F4A3B2C1D00", 0),
            ("web", 0),
            ("0198f0c2-a7b0", 1),
            ("0198f0c2-a7b0-", 0),
            ("0198f0c3", 2),
            ("1d01", 1),
            ("ff", 3),
        ] {
            assert_eq!(pick(&ITEMS, word, "session").map(|item| item.0).unwrap(), ITEMS[index].0, "{word}");
        }
    }

    #[test]
    fn what_fits_several_is_a_conflict_that_lists_them() {
        let failure = pick(&ITEMS, "0198", "session").map(|item| item.0).unwrap_err();
        assert_eq!(failure.status, 5);
        assert!(failure.message.contains(ITEMS[0].0) && failure.message.contains(ITEMS[2].0));
        assert!(!failure.message.contains(ITEMS[3].0));
    }

    #[test]
    fn what_fits_nothing_is_not_found() {
        for word in ["", "f", "nope", "98f0c2"] {
            assert_eq!(pick(&ITEMS, word, "session").map(|item| item.0).unwrap_err().status, 3, "{word}");
        }
    }
}
