//! Small requests over one connection.

use crate::{
    measure::Samples,
    raw::Raw,
    report::{Row, figure},
};
use anyhow::{Context, Result};
use dormouse_tests::Server;
use serde_json::json;

/// Starts `/bin/true` and waits for it, as often as told; prints how many nanoseconds each took.
const SPAWNER: &str = r#"
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
extern char **environ;
int main(int argc, char **argv) {
    for (int n = atoi(argv[1]); n > 0; n--) {
        char *args[] = {"/bin/true", 0};
        struct timespec a, b;
        pid_t pid;
        int status;
        clock_gettime(CLOCK_MONOTONIC, &a);
        if (posix_spawn(&pid, "/bin/true", 0, 0, args, environ) || waitpid(pid, &status, 0) != pid || status) return 1;
        clock_gettime(CLOCK_MONOTONIC, &b);
        printf("%ld\n", (b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec);
    }
    return 0;
}
"#;

/// `/bin/true` as an exec, as a child of a program inside, and by `runsc exec`, in turn; and a question that spawns
/// nothing beside the plain round trip over a raw sandbox's pipes.
pub fn exec() -> Result<Vec<Row>> {
    let server = Server::start();
    let session = server.session();
    session.write_file("/root/spawner.c", SPAWNER.as_bytes()).expect(204);
    session.out("gcc -O2 -o /root/spawner /root/spawner.c");
    let mut sandbox = Raw::new("while read line; do echo $line; done")?;
    sandbox.run()?;
    sandbox.echo("ready")?;

    let (mut ours, mut inside, mut raw) = (Samples::default(), Samples::default(), Samples::default());
    let (mut probe, mut raw_probe) = (Samples::default(), Samples::default());
    for _ in 0..8 {
        for _ in 0..20 {
            let exec = ours.time(|| session.exec_with(&json!({ "argv": ["/bin/true"] })));
            assert_eq!(exec.code, Some(0));
        }
        for nanos in session.out("/root/spawner 20").lines() {
            inside.push(nanos.parse::<f64>().context("the spawner prints numbers")? / 1e6);
        }
        for _ in 0..5 {
            raw.time(|| sandbox.exec(&["/bin/true"]))?;
        }
        let path = session.path("/files/stat?path=/etc/hostname");
        for n in 0..50 {
            probe.time(|| session.client.get(&path)).expect(200);
            raw_probe.time(|| sandbox.echo(&n.to_string()))?;
        }
    }
    server.delete_all_and_check();

    let inside = inside.median();
    let exec = Row {
        target_text: "≤ spawn inside + 2 ms".to_owned(),
        raw: Some(inside),
        ..Row::at_most("exec-true", "exec of `/bin/true` over one HTTP connection, p50", ours.median(), "ms", inside + 2.0)
    };
    let (runsc, echo) = (figure(raw.median(), "ms"), figure(raw_probe.median(), "ms"));
    Ok(vec![
        exec.beside(format!("spawn and wait inside: {}; `runsc exec`: {runsc}", figure(inside, "ms"))),
        Row::at_most("probe", "a question to the guest that spawns nothing (`files/stat`), p50", probe.median(), "ms", 1.0)
            .beside(format!("a line to a raw sandbox's `sh` and back: {echo}")),
    ])
}
