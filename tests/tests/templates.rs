//! Templates: the default one, those that people add, this machine's own tools; and what sleeping sessions keep of them.

use dormouse_tests::{Options, Server, Session, eventually, server::binary};
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

/// Runs a tool of the machine; it must succeed.
#[track_caller]
fn tool(program: &str, args: &[&str]) -> String {
    let done = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(done.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

fn names(server: &Server) -> Vec<String> {
    let list = server.client.get("/v1/templates").expect(200).json();
    list["items"].as_array().expect("a list").iter().map(|t| t["name"].as_str().expect("a name").to_owned()).collect()
}

/// A root file system that is just enough for a shell: programs of this machine and the libraries they name.
fn small_root(root: &Path, mark: &str) {
    for dir in ["bin", "etc", "root", "tmp", "proc", "dev", "run", "sys", "var/tmp", "usr/bin"] {
        fs::create_dir_all(root.join(dir)).expect("a directory");
    }
    symlink("bash", root.join("bin/sh")).expect("a link");
    for name in ["bash", "cat", "sleep", "ls"] {
        let program = PathBuf::from("/bin").join(name);
        fs::copy(&program, root.join("bin").join(name)).expect("a program of this machine");
        for library in tool("ldd", &[&program.to_string_lossy()]).split_whitespace().filter(|word| word.starts_with('/')) {
            let target = root.join(&library[1..]);
            fs::create_dir_all(target.parent().expect("a library lies in a directory")).expect("a directory");
            fs::copy(library, target).expect("a library of this machine");
        }
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/bash\n").expect("a file");
    fs::write(root.join("etc/group"), "root:x:0:\n").expect("a file");
    fs::write(root.join("etc/mark"), mark).expect("a file");
}

/// Two images in one OCI layout would need names; this makes a layout of one image with two layers, the second of which
/// removes a file of the first.
const MAKE_LAYOUT: &str = r#"
import sys, os, io, json, hashlib, tarfile
root, out = sys.argv[1:]
os.makedirs(out + '/blobs/sha256')
def blob(data):
    digest = hashlib.sha256(data).hexdigest()
    open(out + '/blobs/sha256/' + digest, 'wb').write(data)
    return {'digest': 'sha256:' + digest, 'size': len(data)}
def layer(fill):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode='w') as tar: fill(tar)
    return raw.getvalue()
def second(tar):
    for name, text in [('etc/mark', 'image'), ('etc/.wh.gone', '')]:
        info = tarfile.TarInfo(name); info.size = len(text); info.mode = 0o644
        tar.addfile(info, io.BytesIO(text.encode()))
open(root + '/etc/gone', 'w').write('x')
layers = [layer(lambda tar: tar.add(root, '.')), layer(second)]
diffs = ['sha256:' + hashlib.sha256(l).hexdigest() for l in layers]
config = {'architecture': 'amd64', 'os': 'linux', 'rootfs': {'type': 'layers', 'diff_ids': diffs}}
config = dict(blob(json.dumps(config).encode()), mediaType='application/vnd.oci.image.config.v1+json')
layers = [dict(blob(l), mediaType='application/vnd.oci.image.layer.v1.tar') for l in layers]
kind = 'application/vnd.oci.image.manifest.v1+json'
manifest = dict(blob(json.dumps({'schemaVersion': 2, 'mediaType': kind, 'config': config, 'layers': layers}).encode()), mediaType=kind)
open(out + '/index.json', 'w').write(json.dumps({'schemaVersion': 2, 'manifests': [manifest]}))
open(out + '/oci-layout', 'w').write('{"imageLayoutVersion": "1.0.0"}')
"#;

/// Counts, and tells so.
const COUNTER: &str = "secret=$RANDOM$RANDOM; n=0; while :; do n=$((n+1)); echo $n $secret; sleep 0.05; done";

fn lines(session: &Session, exec: &str) -> Vec<String> {
    String::from_utf8(session.output(exec, "stdout")).expect("digits").lines().map(str::to_owned).collect()
}

/// A counter that has begun.
fn counting(session: &Session) -> String {
    let counter = session.start_sh(COUNTER);
    eventually("it counts", || Some(()).filter(|()| lines(session, &counter).len() > 3));
    counter
}

/// The counter goes on where it was, with its secret.
#[track_caller]
fn counts_on(session: &Session, counter: &str) {
    let before = lines(session, counter).len();
    let all = eventually("it counts on", || Some(lines(session, counter)).filter(|l| l.len() > before + 3));
    let (_, secret) = all[0].split_once(' ').expect("a number and a secret");
    let expected: Vec<String> = (1..=all.len()).map(|n| format!("{n} {secret}")).collect();
    assert_eq!(all, expected);
}

/// The guest of the binary under test with a byte more: another program by its hash, the same by what it does. It is
/// taken from the private copy that a server keeps.
fn other_guest(server: &Server, target: &Path) {
    let kept = server.data().join("programs");
    let mut found = None;
    let mut open = vec![kept];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let kind = entry.file_type().expect("a type");
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() && entry.path().to_string_lossy().contains("guest") {
                found = Some(entry.path());
            }
        }
    }
    let mut program = fs::read(found.expect("a server keeps its guest")).expect("it can be read");
    program.extend_from_slice(b"\0newer");
    fs::write(target, program).expect("a file");
    fs::set_permissions(target, fs::Permissions::from_mode(0o755)).expect("a mode");
}

#[test]
fn debian_is_the_default_and_has_the_usual_tools() {
    let server = Server::start();
    let list = server.client.get("/v1/templates").expect(200).json();
    let default: Vec<&Value> = list["items"].as_array().expect("a list").iter().filter(|t| t["default"] == true).collect();
    assert_eq!(default.len(), 1);
    assert_eq!(default[0]["name"], "debian");
    let session = server.session();
    assert_eq!(session.show()["template"], "debian");
    assert_eq!(session.out(". /etc/os-release; echo $VERSION_CODENAME"), "bookworm");
    let tools = "bash ls ps hostname curl git python3 pip3 less vim.tiny ssh gcc make dpkg apt-get";
    assert_eq!(session.out(&format!("for tool in {tools}; do command -v $tool >/dev/null || echo $tool; done")), "");
    assert_eq!(
        session.out("test -s /etc/ssl/certs/ca-certificates.crt && dpkg -s bash | grep Status"),
        "Status: install ok installed"
    );
    assert_eq!(session.out("python3 -m venv /tmp/v && /tmp/v/bin/python -c 'print(6*7)'"), "42");
    assert_eq!(session.out("printf 'int main(){return 42;}' > /tmp/x.c; gcc -o /tmp/x /tmp/x.c; /tmp/x; echo $?"), "42");
    // Made already: asked again it says only the hash, which is the one that sessions get.
    let made = server.cli(&["template", "make", "debian", "--templates"]).arg(dormouse_tests::server::templates()).output();
    let made = made.expect("the CLI runs");
    assert!(made.status.success() && made.stderr.is_empty(), "{made:?}");
    assert_eq!(String::from_utf8_lossy(&made.stdout).trim(), default[0]["hash"].as_str().expect("a hash"));
    server.delete_all_and_check();
}

#[test]
fn packages_wheels_and_repositories_work_inside() {
    let server = Server::start();
    let session = server.session();
    let dir = tempfile::tempdir().expect("a directory");
    let package = dir.path().join("package");
    fs::create_dir_all(package.join("DEBIAN")).expect("a directory");
    fs::create_dir_all(package.join("usr/bin")).expect("a directory");
    let control = "Package: greeter\nVersion: 1.0\nArchitecture: all\nMaintainer: T <t@example.com>\nDescription: greets\n";
    fs::write(package.join("DEBIAN/control"), control).expect("a file");
    for (name, text) in [
        ("DEBIAN/postinst", "#!/bin/sh\nset -e\nid -un > /var/lib/greeter-installed-by\n"),
        ("usr/bin/greet", "#!/bin/sh\necho hello from a package\n"),
    ] {
        fs::write(package.join(name), text).expect("a file");
        fs::set_permissions(package.join(name), fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    let deb = dir.path().join("greeter.deb");
    tool("dpkg-deb", &["--root-owner-group", "--build", &package.to_string_lossy(), &deb.to_string_lossy()]);
    let copied = server.cli(&["cp", &deb.to_string_lossy(), &format!("{}:/root/greeter.deb", session.id)]).output();
    assert!(copied.expect("the CLI runs").status.success());
    session.out("dpkg -i /root/greeter.deb");
    assert_eq!(session.out("greet; cat /var/lib/greeter-installed-by"), "hello from a package\nroot");
    assert!(session.out("dpkg -s greeter").contains("Status: install ok installed"));

    let wheel = dir.path().join("hello_wheel-1.0-py3-none-any.whl");
    let make = "import sys, zipfile\nwith zipfile.ZipFile(sys.argv[1], 'w') as z:\n  \
        z.writestr('hello_wheel.py', 'def answer(): return 42\\n')\n  i = 'hello_wheel-1.0.dist-info/'\n  \
        z.writestr(i + 'METADATA', 'Metadata-Version: 2.1\\nName: hello-wheel\\nVersion: 1.0\\n')\n  \
        z.writestr(i + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n  \
        z.writestr(i + 'RECORD', 'hello_wheel.py,,\\n' + i + 'METADATA,,\\n' + i + 'WHEEL,,\\n' + i + 'RECORD,,\\n')";
    tool("python3", &["-c", make, &wheel.to_string_lossy()]);
    let name = wheel.file_name().expect("a name").to_string_lossy().into_owned();
    session.out("mkdir -p /root/wheels");
    session.write_file(&format!("/root/wheels/{name}"), &fs::read(&wheel).expect("it was made")).expect(204);
    session.out("pip install --no-index --find-links /root/wheels hello-wheel");
    assert_eq!(session.out("python3 -c 'import hello_wheel; print(hello_wheel.answer())'"), "42");

    let git = "git init -q -b main /root/repo && cd /root/repo && git config user.email t@example.com && git config user.name T && \
        echo one > file && git add file && git commit -q -m first && git log --format=%s";
    assert_eq!(session.out(git), "first");

    // All of it is there after a sleep, and on a fresh boot.
    for change in [["hibernate", "wake"], ["stop", "start"]] {
        change.iter().for_each(|what| drop(session.call(what).expect(200)));
        assert_eq!(session.out("greet"), "hello from a package", "{change:?}");
        assert_eq!(session.out("python3 -c 'import hello_wheel; print(hello_wheel.answer())'"), "42");
        assert_eq!(session.out("cd /root/repo && git status --porcelain && git log --format=%s"), "first");
    }
    server.delete_all_and_check();
}

#[test]
fn templates_of_a_directory_an_archive_and_an_image_are_added_used_and_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let text = |name: &str| path(name).to_string_lossy().into_owned();
    let mut server = Server::with(Options { templates: Some(path("templates")), ..Options::default() });
    // Nothing is there yet: the answer says how to make the default one.
    let none = server.client.post("/v1/sessions", &json!({})).expect(404);
    assert!(none.text().contains("debian") && none.text().contains("cargo xtask build"), "{}", none.text());
    assert_eq!(names(&server), Vec::<String>::new());

    small_root(&path("root"), "tar");
    tool("tar", &["-czf", &text("root.tar.gz"), "-C", &text("root"), "."]);
    tool("python3", &["-c", MAKE_LAYOUT, &text("root"), &text("layout")]);
    fs::remove_file(path("root/etc/gone")).expect("the layout's maker left it");
    fs::write(path("root/etc/mark"), "dir").expect("a file");
    let add = |name: &str, kind: &str, from: &str| {
        let added = server.cli(&["template", "add", name, kind, from]).output().expect("the CLI runs");
        (added.status.code(), String::from_utf8_lossy(&[added.stdout, added.stderr].concat()).into_owned())
    };
    for (name, kind, from) in [("d", "--dir", "root"), ("t", "--tar", "root.tar.gz"), ("o", "--oci-layout", "layout")] {
        let (code, told) = add(name, kind, &text(from));
        assert_eq!(code, Some(0), "{told}");
    }
    assert_eq!(names(&server), ["d", "o", "t"]);
    let listed = server.cli(&["template", "ls"]).output().expect("the CLI runs");
    assert!(String::from_utf8_lossy(&listed.stdout).lines().count() >= 4, "{listed:?}");

    let mut sessions = Vec::new();
    for (template, mark) in [("d", "dir"), ("t", "tar"), ("o", "image")] {
        let session = server.session_with(&json!({ "template": template }));
        assert_eq!(session.out("cat /etc/mark; echo; ls /etc/gone 2>/dev/null; :"), mark, "{template}");
        session.out("echo changed > /etc/mark; echo new > /root/new");
        sessions.push(session);
    }
    // A session's changes are its own: the next one of the same template has the template's files.
    let again = server.session_with(&json!({ "template": "t" }));
    assert_eq!(again.out("cat /etc/mark; echo; ls /root"), "tar");
    again.delete();

    // What is wrong is said, and leaves nothing behind.
    for (name, kind, from, says) in [
        ("Bad Name", "--dir", "root", "can't name a template"),
        ("n", "--dir", "nowhere", "nowhere"),
        ("n", "--tar", "nowhere.tar", "nowhere"),
        ("n", "--tar", "root/etc/mark", ""),
        ("n", "--oci-layout", "root", ""),
    ] {
        let (code, told) = add(name, kind, &text(from));
        assert!(matches!(code, Some(1..=3)), "{name} {kind} {from}: {told}");
        assert!(told.contains(says) && !told.contains("internal"), "{told}");
    }
    let post = |body: Value| server.client.post("/v1/templates", &body);
    post(json!({ "name": "n", "kind": "dir", "path": format!("{}/../root", text("root")) })).expect(400);
    post(json!({ "name": "n", "kind": "dir", "path": "root" })).expect(400);
    post(json!({ "name": "n", "kind": "floppy", "path": "/x" })).expect(400);
    server.client.delete("/v1/templates/nowhere").expect(404);
    assert_eq!(names(&server), ["d", "o", "t"]);
    let writer = server.client.post("/v1/tokens", &json!({ "name": "w" })).expect(201).json();
    let writer = server.client.with_token(writer["token"].as_str().expect("a secret"));
    writer.post("/v1/templates", &json!({ "name": "n", "kind": "dir", "path": text("root") })).expect(403);
    writer.delete("/v1/templates/d").expect(403);

    // A hostile archive gets nothing outside, whatever it is called.
    let hostile = "import sys, tarfile, io\nt = tarfile.open(sys.argv[1], 'w')\ndef f(name, **k):\n  i = tarfile.TarInfo(name)\n  \
        d = b'evil'\n  i.size = 0 if k else len(d)\n  for a, v in k.items(): setattr(i, a, v)\n  t.addfile(i, io.BytesIO(d))\n";
    let outside = text("outside");
    for (number, entries) in [
        format!("f('../../../..{outside}')"),
        format!("f('l', type=tarfile.SYMTYPE, linkname='{}'); f('l/outside')", dir.path().display()),
        format!("f('h', type=tarfile.LNKTYPE, linkname='{}')", text("root/etc/mark")),
        "f('disk', type=tarfile.BLKTYPE, devmajor=8)".to_owned(),
    ]
    .iter()
    .enumerate()
    {
        let archive = text(&format!("hostile{number}.tar"));
        tool("python3", &["-c", &format!("{hostile}{entries}\nt.close()"), &archive]);
        let (code, told) = add("hostile", "--tar", &archive);
        assert!(code != Some(0) && !path("outside").exists(), "{entries}: {told}");
        assert_eq!(names(&server), ["d", "o", "t"], "{entries}");
    }

    // Without its name a template stays for the sessions that need it, through crashes, and goes with the last.
    let session = &sessions[1];
    let counter = counting(session);
    session.hibernate();
    let removed = server.cli(&["template", "rm", "t"]).output().expect("the CLI runs");
    assert!(removed.status.success(), "{removed:?}");
    assert_eq!(names(&server), ["d", "o"]);
    server.client.post("/v1/sessions", &json!({ "template": "t" })).expect(404);
    server.crash();
    let session = session.on(&server.client);
    session.wake();
    counts_on(&session, &counter);
    session.call("stop").expect(200);
    session.call("start").expect(200);
    assert_eq!(session.out("cat /etc/mark /root/new"), "changed\nnew");
    let trees = || fs::read_dir(path("templates/trees")).expect("a directory").flatten().filter(|e| e.path().is_dir()).count();
    assert_eq!(trees(), 3);
    server.delete_all_and_check();
    server.crash();
    eventually("the tree that nobody needs has gone", || (trees() == 2).then_some(()));
    assert_eq!(names(&server), ["d", "o"]);
}

#[test]
fn memory_survives_a_changed_source_a_moved_name_and_another_guest() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    small_root(&path("root"), "first");
    let add = |server: &Server| {
        let added =
            server.cli(&["template", "add", "mine", "--dir", &path("root").to_string_lossy()]).output().expect("the CLI runs");
        assert!(added.status.success(), "{added:?}");
    };
    let newer = path("guest");
    let mut server = Server::with(Options { templates: Some(path("templates")), ..Options::default() });
    add(&server);
    let session = server.session_with(&json!({ "template": "mine" }));
    let counter = counting(&session);
    other_guest(&server, &newer);
    session.hibernate();

    // The program it runs is replaced in the source, the name gets another tree, the server another guest.
    fs::write(path("root/bin/new"), "#!/bin/nonsense").expect("a file");
    fs::rename(path("root/bin/new"), path("root/bin/bash")).expect("a rename");
    fs::copy("/bin/bash", path("root/bin/sh2")).expect("a copy");
    fs::remove_file(path("root/bin/sh")).expect("a link");
    fs::rename(path("root/bin/sh2"), path("root/bin/sh")).expect("a rename");
    fs::write(path("root/etc/mark"), "second").expect("a file");
    add(&server);
    server.terminate();
    server.set_args(&["--guest", &newer.to_string_lossy()]);
    server.start_again();

    let session = session.on(&server.client);
    session.wake();
    counts_on(&session, &counter);
    assert_eq!(session.out("cat /etc/mark"), "first", "its files are those it had");
    let fresh = server.session_with(&json!({ "template": "mine" }));
    assert_eq!(fresh.out("cat /etc/mark"), "second");
    // A fresh boot takes the new guest, on the old files.
    session.call("stop").expect(200);
    session.call("start").expect(200);
    assert_eq!(session.out("cat /etc/mark"), "first");
    server.delete_all_and_check();
}

#[test]
fn sessions_of_the_machines_own_tools_survive_its_upgrades_and_tell_of_other_changes() {
    let tag = format!("dormouse-test-{}", std::process::id());
    let programs = [format!("/usr/local/bin/{tag}-upgraded"), format!("/usr/local/bin/{tag}-written")];
    let _cleaned = Removed(programs.clone().map(PathBuf::from).to_vec());
    for program in &programs {
        fs::copy("/bin/sleep", program).expect("this test may write to the machine's programs");
    }
    // Beside the machine's programs, where hard links work.
    let templates = tempfile::Builder::new().prefix("dormouse-templates-").tempdir_in("/var/tmp").expect("a directory");
    let made = Command::new(binary()).args(["template", "make", "host", "--templates"]).arg(templates.path()).output();
    let made = made.expect("the CLI runs");
    assert!(made.status.success(), "{made:?}");
    let told = String::from_utf8_lossy(&made.stderr);
    assert!(told.contains("files shared with the machine"), "{told}");
    let linked = fs::metadata("/bin/bash").expect("a shell").nlink() > 1;
    let copied = extra_bytes(templates.path());
    println!("extra disk: {copied} bytes, linked: {linked}");
    assert!(!linked || copied <= 100 << 20, "{copied} bytes of extra disk");

    let mut server = Server::with(Options { templates: Some(templates.path().to_owned()), ..Options::default() });
    let session = server.session_with(&json!({ "template": "host" }));
    // Its tools, and nothing else of it.
    assert_eq!(session.out("bash --version | head -1"), tool("bash", &["-c", "bash --version | head -1"]).trim_end());
    assert!(session.out("dpkg -l | wc -l").parse::<u32>().expect("a number") > 20);
    assert_eq!(session.out("ls -A /root /home | grep -v : | grep -v '^$'; cat /etc/shadow 2>/dev/null; :"), "");
    let counter = session.start_sh(&format!("n=0; while :; do n=$((n+1)); echo $n same; {} 0.05; done", programs[0]));
    eventually("it counts", || Some(()).filter(|()| lines(&session, &counter).len() > 3));
    let newer = templates.path().join("guest");
    other_guest(&server, &newer);
    session.hibernate();

    // As a package upgrade does: a new file, renamed over the old.
    let new = format!("{}.dpkg-new", programs[0]);
    fs::write(&new, "#!/bin/sh\nexit 1\n").expect("a file");
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).expect("a mode");
    fs::rename(&new, &programs[0]).expect("a rename");
    server.terminate();
    server.set_args(&["--guest", &newer.to_string_lossy()]);
    server.start_again();
    let session = session.on(&server.client);
    session.wake();
    counts_on(&session, &counter);
    assert!(!session.events().iter().any(|event| event["type"] == "template.changed"));

    // Written into in place: told in the log at the start, and by an event at the wake.
    if linked {
        session.hibernate();
        let mut bytes = fs::read(&programs[1]).expect("it is there");
        bytes.extend_from_slice(b"more");
        fs::write(&programs[1], bytes).expect("it can be written");
        server.crash();
        eventually("the log tells of it", || server.log().contains("changed in place").then_some(()));
        let session = session.on(&server.client);
        session.wake();
        let event = session.event("template.changed");
        assert_eq!((&event["data"]["files"], &event["data"]["paths"]), (&json!(1), &json!([programs[1]])), "{event}");
        counts_on(&session, &counter);
    }
    server.delete_all_and_check();
}

/// Files that are removed in the end, however the test ends.
struct Removed(Vec<PathBuf>);

impl Drop for Removed {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

/// Disk use of a directory without what other links share.
fn extra_bytes(dir: &Path) -> u64 {
    let mut total = 0;
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let meta = entry.metadata().expect("it is there");
            if meta.is_dir() {
                open.push(entry.path());
            }
            if meta.is_dir() || meta.nlink() == 1 {
                total += meta.blocks() * 512;
            }
        }
    }
    total
}
