//! `sudo` and `su`: run a program as somebody else.

use super::{
    ask::{self, Answer},
    fail,
};
use crate::users::{self, User};
use std::{
    collections::BTreeMap,
    io,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};
use wire::records::Program;

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What a command line asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Wish {
    user: String,
    /// Empty: the user's shell.
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    keep_env: bool,
    /// As a login: the user's home, a fresh environment.
    login: bool,
    set_home: bool,
    /// Given to the user's shell with `-c`.
    command: Option<String>,
    shell: Option<String>,
    /// `sudo -v`, `-l` and the like: nothing to run.
    nothing: bool,
}

fn parse_sudo(args: &[String]) -> Result<Wish, String> {
    let mut wish = Wish { user: "root".into(), set_home: true, ..Wish::default() };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = |what: &str| args.next().cloned().ok_or_else(|| format!("{what} needs a value"));
        match arg.as_str() {
            "--" => {
                wish.argv.extend(args.by_ref().cloned());
                break;
            }
            "-u" | "--user" => wish.user = value("-u")?,
            "-g" | "--group" | "-p" | "--prompt" | "-C" | "-h" | "-r" | "-t" => drop(value(arg)?),
            "-E" | "--preserve-env" => wish.keep_env = true,
            "-n" | "-S" | "-H" | "-b" | "-k" | "-A" | "-P" | "--non-interactive" | "--stdin" | "--set-home" => {}
            "-i" | "--login" => wish.login = true,
            "-s" | "--shell" => {}
            "-v" | "-K" | "-l" | "-V" | "--validate" | "--list" => wish.nothing = true,
            _ if arg.starts_with("--user=") => wish.user = arg["--user=".len()..].to_owned(),
            _ if arg.starts_with("--preserve-env=") => wish.keep_env = true,
            _ if arg.starts_with("-u") => wish.user = arg[2..].to_owned(),
            // Several letters in one, none of which takes a value.
            _ if arg.len() > 2 && arg.starts_with('-') && arg[1..].chars().all(|c| "EnSHbkAPis".contains(c)) => {
                wish.keep_env |= arg.contains('E');
                wish.login |= arg.contains('i');
            }
            _ if arg.starts_with('-') => return Err(format!("unknown option {arg}")),
            _ => match arg.split_once('=') {
                Some((key, value)) if is_name(key) => drop(wish.env.insert(key.to_owned(), value.to_owned())),
                _ => {
                    wish.argv.push(arg.clone());
                    wish.argv.extend(args.by_ref().cloned());
                    break;
                }
            },
        }
    }
    // "#1000" is a number in sudo's words.
    wish.user = wish.user.trim_start_matches('#').to_owned();
    Ok(wish)
}

fn is_name(key: &str) -> bool {
    !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn parse_su(args: &[String]) -> Result<Wish, String> {
    let mut wish = Wish { user: "root".into(), keep_env: true, set_home: true, ..Wish::default() };
    let mut args = args.iter();
    let mut named = false;
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "-" | "-l" | "--login" => (wish.login, wish.keep_env) = (true, false),
            "-c" | "--command" => wish.command = Some(args.next().cloned().ok_or("-c needs a command")?),
            "-s" | "--shell" => wish.shell = Some(args.next().cloned().ok_or("-s needs a shell")?),
            "-m" | "-p" | "--preserve-environment" => wish.set_home = false,
            "--" => {}
            _ if arg.starts_with("--command=") => wish.command = Some(arg["--command=".len()..].to_owned()),
            _ if arg.starts_with('-') => return Err(format!("unknown option {arg}")),
            _ if named => wish.argv.push(arg.clone()),
            _ => (named, wish.user) = (true, arg.clone()),
        }
    }
    Ok(wish)
}

/// Called as `sudo`.
pub fn sudo(args: &[String]) -> ExitCode {
    carry_out("sudo", parse_sudo(args))
}

/// Called as `su`.
pub fn su(args: &[String]) -> ExitCode {
    let wish = parse_su(args).map(|mut wish| {
        // su has no program of its own, only the shell with arguments.
        let rest = std::mem::take(&mut wish.argv);
        let mut argv = vec![String::new()];
        argv.extend(wish.command.take().map(|c| ["-c".to_owned(), c]).into_iter().flatten());
        argv.extend(rest);
        wish.argv = argv;
        wish
    });
    carry_out("su", wish)
}

fn carry_out(name: &str, wish: Result<Wish, String>) -> ExitCode {
    let wish = match wish {
        Ok(wish) if wish.nothing => return ExitCode::SUCCESS,
        Ok(wish) => wish,
        Err(message) => return fail(name, &message, 1),
    };
    let user = match users::find(&wish.user) {
        Ok(user) => user,
        Err(error) => return fail(name, &error.message, 1),
    };
    let program = program(&wish, &user);
    if rustix::process::geteuid().is_root() {
        let error = exec(&program, &user, wish.login);
        let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
        return fail(name, &format!("{}: {}", program.argv[0], crate::program::words(&error)), code);
    }
    match ask::run(program) {
        Ok(Answer::Ended { exit_code: Some(code), .. }) => ExitCode::from(code as u8),
        Ok(Answer::Ended { signal, .. }) => ExitCode::from(128u8.saturating_add(signal.unwrap_or(0) as u8)),
        Ok(Answer::Failed { message, exit_code }) => fail(name, &message, exit_code),
        Ok(_) => fail(name, "the guest gave an answer that doesn't fit", 1),
        Err(error) => fail(name, &format!("the guest can't be asked: {error}"), 1),
    }
}

fn program(wish: &Wish, user: &User) -> Program {
    let shell = wish.shell.clone().unwrap_or_else(|| user.shell.clone());
    let mut argv = wish.argv.clone();
    match argv.first_mut() {
        Some(first) if first.is_empty() => *first = shell.clone(),
        Some(_) if wish.login => {
            let command = argv.join(" ");
            argv = vec![shell.clone(), "-c".into(), command];
        }
        Some(_) => {}
        None => argv = vec![shell.clone()],
    }
    if wish.login && argv[0] == shell {
        argv.insert(1, "-l".into());
    }
    let mut env: BTreeMap<String, String> = if wish.keep_env {
        std::env::vars().collect()
    } else {
        std::env::vars().filter(|(k, _)| ["TERM", "LANG", "DISPLAY", crate::program::MARKER].contains(&k.as_str())).collect()
    };
    env.entry("PATH".into()).or_insert_with(|| PATH.into());
    if wish.set_home {
        env.insert("HOME".into(), user.home.clone());
        env.insert("SHELL".into(), shell);
        env.insert("USER".into(), user.name.clone());
        env.insert("LOGNAME".into(), user.name.clone());
    }
    env.extend(wish.env.clone());
    let cwd =
        if wish.login { Some(user.home.clone()) } else { std::env::current_dir().ok().map(|d| d.to_string_lossy().into_owned()) };
    Program { argv, env, cwd, user: Some(wish.user.clone()) }
}

/// Becomes the program; returns only an error. Except for a login the directory stays what it is, also where the new
/// user could not enter it.
fn exec(program: &Program, user: &User, login: bool) -> io::Error {
    // SAFETY: plain calls on numbers and on a valid array; the process has one thread.
    let became = unsafe {
        libc::setgroups(user.groups.len(), user.groups.as_ptr()) == 0
            && libc::setresgid(user.gid, user.gid, user.gid) == 0
            && libc::setresuid(user.uid, user.uid, user.uid) == 0
    };
    if !became {
        return io::Error::last_os_error();
    }
    let mut command = Command::new(&program.argv[0]);
    command.args(&program.argv[1..]).env_clear().envs(&program.env);
    if let Some(cwd) = program.cwd.as_ref().filter(|_| login) {
        command.current_dir(cwd);
    }
    command.exec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn sudo_lines_are_understood() {
        let cases: [(&str, &str, &[&str], bool); 8] = [
            ("ls -l", "root", &["ls", "-l"], false),
            ("-u bob id -u", "bob", &["id", "-u"], false),
            ("-ubob id", "bob", &["id"], false),
            ("--user=bob -- -odd", "bob", &["-odd"], false),
            ("-nE env", "root", &["env"], true),
            ("-n -H -S true", "root", &["true"], false),
            ("-u #1000 id", "1000", &["id"], false),
            ("A=1 sh -c x", "root", &["sh", "-c", "x"], false),
        ];
        for (line, user, argv, keep_env) in cases {
            let wish = parse_sudo(&words(line)).unwrap();
            assert_eq!(
                (wish.user.as_str(), wish.argv, wish.keep_env),
                (user, argv.iter().map(|a| (*a).to_owned()).collect(), keep_env),
                "{line}"
            );
        }
        assert_eq!(
            parse_sudo(&words("A=1 B=x=y env")).unwrap().env,
            [("A".into(), "1".into()), ("B".into(), "x=y".into())].into()
        );
        assert!(parse_sudo(&words("-v")).unwrap().nothing);
        assert!(parse_sudo(&words("--what ls")).is_err());
        assert!(parse_sudo(&words("-u")).is_err());
    }

    #[test]
    fn su_lines_are_understood() {
        let wish = parse_su(&["-".into(), "bob".into(), "-c".into(), "echo hi".into()]).unwrap();
        assert_eq!((wish.user.as_str(), wish.login, wish.command.as_deref()), ("bob", true, Some("echo hi")));
        let wish = parse_su(&words("")).unwrap();
        assert_eq!((wish.user.as_str(), wish.login), ("root", false));
        assert!(parse_su(&words("-c")).is_err());
    }

    #[test]
    fn a_login_runs_the_users_shell() {
        let user =
            User { name: "bob".into(), uid: 7, gid: 7, groups: vec![7], home: "/home/bob".into(), shell: "/bin/zsh".into() };
        let made = program(&parse_sudo(&words("-i -u bob")).unwrap(), &user);
        assert_eq!((made.argv, made.cwd.as_deref()), (vec!["/bin/zsh".to_owned(), "-l".into()], Some("/home/bob")));
        let made = program(&parse_sudo(&words("-u bob id")).unwrap(), &user);
        assert_eq!((made.argv, made.env["HOME"].as_str()), (vec!["id".to_owned()], "/home/bob"));
    }
}
