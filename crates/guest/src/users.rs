//! Users and groups of the inside, read from its own `/etc/passwd` and `/etc/group`.
//!
//! A static program can't load the C library's name services, and files are all that a session has.

use std::path::Path;
use wire::{Code, WireError};

/// Who a program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
    pub shell: String,
}

impl User {
    /// Root as every system has it, without a look at any file.
    pub fn root() -> Self {
        let (home, shell) = ("/root".to_owned(), default_shell());
        Self { name: "root".into(), uid: 0, gid: 0, groups: vec![0], home, shell }
    }
}

fn default_shell() -> String {
    if Path::new("/bin/bash").exists() { "/bin/bash".into() } else { "/bin/sh".into() }
}

/// Finds a user: a name, or `uid[:gid]` in numbers, which needs no entry in the file.
///
/// # Errors
/// [`Code::UnknownUser`] for a name that isn't in `/etc/passwd`.
pub fn find(wanted: &str) -> Result<User, WireError> {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let group = std::fs::read_to_string("/etc/group").unwrap_or_default();
    find_in(wanted, &passwd, &group).ok_or_else(|| {
        WireError::new(Code::UnknownUser, format!("user {wanted:?} is not in /etc/passwd of the session; give uid[:gid] instead"))
    })
}

fn find_in(wanted: &str, passwd: &str, group: &str) -> Option<User> {
    let (user, gid) = match wanted.split_once(':') {
        Some((user, gid)) => (user, Some(group_number(gid, group)?)),
        None => (wanted, None),
    };
    let mut found = entries(passwd).find(|entry| entry.name == user);
    if found.is_none()
        && let Ok(uid) = user.parse::<u32>()
    {
        found = entries(passwd).find(|entry| entry.uid == uid);
        if found.is_none() {
            let gid = gid.unwrap_or(uid);
            let (name, home) = (uid.to_string(), "/".to_owned());
            return Some(User { name, uid, gid, groups: vec![gid], home, shell: "/bin/sh".into() });
        }
    }
    let mut found = found?;
    if let Some(gid) = gid {
        found.gid = gid;
    }
    found.groups = supplementary(&found.name, found.gid, group);
    Some(found)
}

fn entries(passwd: &str) -> impl Iterator<Item = User> + '_ {
    passwd.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, rest @ ..] = fields.as_slice() else { return None };
        let shell = rest.first().filter(|s| !s.is_empty()).unwrap_or(&"/bin/sh");
        let home = if home.is_empty() { "/" } else { home };
        Some(User {
            name: (*name).to_owned(),
            uid: uid.parse().ok()?,
            gid: gid.parse().ok()?,
            groups: Vec::new(),
            home: home.to_owned(),
            shell: (*shell).to_owned(),
        })
    })
}

fn group_number(wanted: &str, group: &str) -> Option<u32> {
    wanted.parse().ok().or_else(|| {
        group.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next()? == wanted).then(|| fields.nth(1)?.parse().ok()).flatten()
        })
    })
}

fn supplementary(name: &str, gid: u32, group: &str) -> Vec<u32> {
    let mut groups = vec![gid];
    for line in group.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [_, _, number, members] = fields.as_slice() else { continue };
        if members.split(',').any(|m| m == name)
            && let Ok(number) = number.parse()
            && !groups.contains(&number)
        {
            groups.push(number);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\nbroken line\nann:x:1000:1000:Ann,,,:/home/ann:\nbob:x:1001:100::/home/bob:/bin/zsh";
    const GROUP: &str = "root:x:0:\nusers:x:100:\nwheel:x:10:bob,ann\naudio:x:29:ann\nodd";

    #[test]
    fn users_are_found_by_name_and_number() {
        type Found = (u32, u32, &'static [u32], &'static str);
        let cases: [(&str, Option<Found>); 8] = [
            ("root", Some((0, 0, &[0], "/root"))),
            ("ann", Some((1000, 1000, &[1000, 10, 29], "/home/ann"))),
            ("1001", Some((1001, 100, &[100, 10], "/home/bob"))),
            ("bob:audio", Some((1001, 29, &[29, 10], "/home/bob"))),
            ("4242", Some((4242, 4242, &[4242], "/"))),
            ("4242:7", Some((4242, 7, &[7], "/"))),
            ("nobody-here", None),
            ("ann:nogroup", None),
        ];
        for (wanted, expected) in cases {
            let found = find_in(wanted, PASSWD, GROUP);
            let found = found.as_ref().map(|u| (u.uid, u.gid, &u.groups[..], u.home.as_str()));
            assert_eq!(found, expected, "{wanted}");
        }
        assert_eq!(find_in("ann", PASSWD, GROUP).unwrap().shell, "/bin/sh", "an empty shell means sh");
    }
}
