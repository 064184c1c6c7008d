//! From a wire [`Program`] to a [`Plan`]: user, environment, directory and the files to try.

use crate::{
    child::{Credentials, Plan, Stage, StartError},
    users::{self, User},
};
use std::{collections::BTreeMap, ffi::CString, io, os::fd::RawFd, path::Path};
use wire::{Code, WireError, guest::Identity, guest::Work, records::Program};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The variable by which a process tree is told from others where there are no cgroups.
pub const MARKER: &str = "DORMOUSE_WORK";

/// What a plan is made from, besides the program.
pub struct Setting<'a> {
    pub identity: Option<&'a Identity>,
    /// In a sandbox the guest is init, and the environment is made from nothing; on a host it is the user's own.
    pub is_init: bool,
    pub work: &'a Work,
    pub stdio: [RawFd; 3],
    pub terminal: bool,
    pub cgroup: Option<RawFd>,
}

/// A work's name as one word, for its marker.
pub fn work_name(work: &Work) -> String {
    match work {
        Work::Exec(id) => format!("exec-{id}"),
        Work::Terminal(id) => format!("terminal-{id}"),
        Work::Service(name) => format!("service-{name}"),
    }
}

/// The user that a program asks for; `None` where it is the guest's own.
///
/// # Errors
/// [`Code::UnknownUser`].
pub fn user_of(program: &Program) -> Result<Option<User>, WireError> {
    match program.user.as_deref() {
        None => Ok(None),
        Some("root" | "0") if rustix::process::geteuid().is_root() => Ok(None),
        Some(wanted) => users::find(wanted).map(Some),
    }
}

/// Makes the plan.
///
/// # Errors
/// [`Code::Invalid`] for an empty argv or a NUL.
pub fn plan(program: &Program, user: Option<&User>, setting: &Setting<'_>) -> Result<Plan, WireError> {
    let Some(name) = program.argv.first().filter(|name| !name.is_empty()) else {
        return Err(WireError::new(Code::Invalid, "argv is empty: name a program"));
    };
    let env = environment(program, user, setting);
    let home = env.get("HOME").map_or("/", String::as_str);
    let workdir = setting.identity.and_then(|i| i.workdir.as_deref());
    let cwd = match program.cwd.as_deref().or(workdir) {
        Some(cwd) => cwd,
        None if Path::new(home).is_dir() => home,
        None => "/",
    };
    let text = |what: &str, value: &str| {
        CString::new(value).map_err(|_| WireError::new(Code::Invalid, format!("a NUL byte in {what} {value:?}")))
    };
    let candidates = candidates(name, env.get("PATH").map_or("", String::as_str));
    Ok(Plan {
        argv: program.argv.iter().map(|a| text("the argument", a)).collect::<Result<_, _>>()?,
        envp: env.iter().map(|(k, v)| text("the variable", &format!("{k}={v}"))).collect::<Result<_, _>>()?,
        candidates: candidates.iter().map(|c| text("the program", c)).collect::<Result<_, _>>()?,
        cwd: text("the directory", cwd)?,
        user: user.map(|u| Credentials { uid: u.uid, gid: u.gid, groups: u.groups.clone() }),
        stdio: setting.stdio,
        terminal: setting.terminal,
        cgroup: setting.cgroup,
        drop_capabilities: setting.is_init,
    })
}

fn environment(program: &Program, user: Option<&User>, setting: &Setting<'_>) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    let mut set = |key: &str, value: &str| env.insert(key.to_owned(), value.to_owned());
    if setting.is_init {
        set("PATH", PATH);
        set("LANG", "C.UTF-8");
    } else {
        for (key, value) in std::env::vars_os() {
            if let (Some(key), Some(value)) = (key.to_str(), value.to_str()) {
                set(key, value);
            }
        }
    }
    if setting.is_init || user.is_some() {
        let root = User::root();
        let user = user.unwrap_or(&root);
        set("HOME", &user.home);
        set("USER", &user.name);
        set("LOGNAME", &user.name);
        set("SHELL", &user.shell);
    }
    if setting.terminal {
        set("TERM", "xterm-256color");
    }
    set(MARKER, &work_name(setting.work));
    if let Some(identity) = setting.identity {
        if let Some(network) = identity.network.as_ref().filter(|_| setting.is_init) {
            env.extend(wire::network::environment(network).into_iter().map(|(name, value)| (name.to_owned(), value)));
        }
        env.extend(identity.env.clone());
    }
    env.extend(program.env.clone());
    env.retain(|key, _| !key.is_empty() && !key.contains('='));
    env
}

fn candidates(name: &str, path: &str) -> Vec<String> {
    if name.contains('/') {
        return vec![name.to_owned()];
    }
    let path = if path.is_empty() { PATH } else { path };
    path.split(':').map(|dir| if dir.is_empty() { format!("./{name}") } else { format!("{dir}/{name}") }).collect()
}

/// A failed start in words that name the program, directory or user.
pub fn explain(program: &Program, failed: &StartError, plan: &Plan) -> WireError {
    let name = program.argv.first().map_or("", String::as_str);
    let error = &failed.error;
    match failed.stage {
        Stage::Clone if error.raw_os_error() == Some(libc::EAGAIN) => {
            WireError::new(Code::Busy, format!("{name}: no more processes can be started in this session"))
        }
        Stage::Directory => {
            let cwd = plan.cwd.to_string_lossy();
            WireError::new(Code::BadWorkingDirectory, format!("working directory {cwd:?}: {}", words(error)))
        }
        Stage::User => {
            let user = program.user.as_deref().unwrap_or("");
            WireError::new(Code::PermissionDenied, format!("can't become user {user:?}: {}", words(error)))
        }
        Stage::Exec => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) if name.contains('/') && Path::new(name).exists() => {
                WireError::new(Code::NotFound, format!("{name}: the interpreter that it names was not found"))
            }
            Some(libc::ENOENT | libc::ENOTDIR) => WireError::new(Code::NotFound, format!("{name}: not found")),
            Some(libc::E2BIG) => WireError::new(Code::Invalid, format!("{name}: arguments and environment are too long")),
            _ => WireError::new(Code::NotExecutable, format!("{name}: can't be run: {}", words(error))),
        },
        Stage::Clone | Stage::Terminal | Stage::Stdio => {
            WireError::new(Code::Internal, format!("{name}: could not be started: {}", words(error)))
        }
    }
}

/// An operating-system error without its number.
pub fn words(error: &io::Error) -> String {
    let text = error.to_string();
    let end = text.find(" (os error").unwrap_or(text.len());
    text[..end].to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_for_along_the_path() {
        let cases = [
            ("ls", "/a:/b", vec!["/a/ls", "/b/ls"]),
            ("ls", "/a::/b", vec!["/a/ls", "./ls", "/b/ls"]),
            ("./ls", "/a", vec!["./ls"]),
            ("/bin/ls", "/a", vec!["/bin/ls"]),
        ];
        for (name, path, expected) in cases {
            assert_eq!(candidates(name, path), expected, "{name} in {path}");
        }
        assert_eq!(candidates("ls", "").len(), PATH.split(':').count());
    }

    #[test]
    fn the_program_wins_over_the_session_and_the_session_over_the_base() {
        let identity = Identity {
            hostname: "h".into(),
            machine_id: String::new(),
            seed: String::new(),
            env: [("LANG".into(), "de".into()), ("A".into(), "session".into())].into(),
            workdir: Some("/srv".into()),
            services: vec![],
            pids: None,
            network: None,
        };
        let work = Work::Exec(model::ExecId::new());
        let setting =
            Setting { identity: Some(&identity), is_init: true, work: &work, stdio: [0, 1, 2], terminal: true, cgroup: None };
        let program = Program { argv: vec!["x".into()], env: [("A".into(), "program".into())].into(), ..Program::default() };
        let env = environment(&program, None, &setting);
        let got: Vec<&str> = ["LANG", "A", "HOME", "TERM"].iter().map(|k| env[*k].as_str()).collect();
        assert_eq!(got, ["de", "program", "/root", "xterm-256color"]);
        let plan = plan(&program, None, &setting).unwrap();
        assert_eq!(plan.cwd.to_str().unwrap(), "/srv");
        let nul = Program { argv: vec!["x".into(), "a\0b".into()], ..Program::default() };
        assert_eq!(super::plan(&nul, None, &setting).unwrap_err().code, Code::Invalid);
    }
}
